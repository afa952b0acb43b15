import dataclasses

import pytest

from gptoss_debug.diagnosis.coverage import LoadCoverage, load_coverage
from gptoss_debug.layouts.catalog import Placement
from gptoss_debug.recording.ledger import Ledger
from gptoss_debug.recording.recording import Recording

SCALE = "model.layers.1.mlp.experts.routed_experts.w13_weight_scale"


@pytest.mark.parametrize(
    ("backend", "tp", "expert_parallel"),
    [("marlin", 1, False), ("marlin", 2, False), ("marlin", 2, True), ("raw", 2, False), ("bf16", 1, False)],
)
def test_a_real_load_writes_every_region_once(recorded, backend, tp, expert_parallel):
    coverage = load_coverage(recorded(backend, tp, expert_parallel))
    assert {p.status for p in coverage.parameters} == {"once"}
    assert len(coverage.parameters) == (63 if backend != "bf16" else 55) * tp
    assert coverage.verdict.verdict == "ok"
    padded = {p.parameter.rpartition(".")[2] for p in coverage.parameters if p.padding}
    assert padded == ({"w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias"}
                      if backend == "marlin" else set())  # fmt: skip


def changed(recording: Recording, change) -> Recording:
    """Return the recording with other ledger rows; the files stay as they are."""
    rank = recording.ranks[0]
    rows = tuple(row for old in rank.ledger.rows for row in change(old))
    return Recording(
        recording.path, (dataclasses.replace(rank, ledger=Ledger(rows, rank.ledger.offered)), *recording.ranks[1:])
    )


def fault(recording):
    coverage = load_coverage(recording)
    assert coverage.verdict.verdict == "fault"
    (wrong,) = [p for p in coverage.parameters if p.status != "once"]
    return coverage, wrong


def test_a_tensor_that_never_came(recorded):
    coverage, wrong = fault(changed(recorded(), lambda row: [] if row.parameter == SCALE else [row]))
    assert (wrong.parameter, wrong.status, wrong.never) == (SCALE, "never", 8 * 384 * 5)
    assert coverage.unused == ("model.layers.1.mlp.experts.gate_up_proj_scales",)
    assert any("nothing of it was written" in finding["sentence"] for finding in coverage.verdict.findings)


def test_half_a_tensor_written_twice(recorded):
    """An element counter is satisfied with this; regions are not."""

    def twice(row):
        if row.parameter != SCALE:
            return [row]
        half = dataclasses.replace(row, region=((0, 4), *row.region[1:]))
        return [half, half]

    _, wrong = fault(changed(recorded(), twice))
    assert (wrong.status, wrong.never, wrong.twice) == ("incomplete", 4 * 384 * 5, 4 * 384 * 5)
    assert wrong.regions == ("[4:8, 0:384, 0:5]",)


def test_a_tensor_written_twice(recorded):
    _, wrong = fault(changed(recorded(), lambda row: [row, row] if row.parameter == SCALE else [row]))
    assert (wrong.status, wrong.twice) == ("twice", 8 * 384 * 5)


def test_a_region_that_is_not_known(recorded):
    _, wrong = fault(
        changed(recorded(), lambda row: [dataclasses.replace(row, region=None) if row.parameter == SCALE else row])
    )
    assert wrong.status == "unknown"


def test_an_empty_share_needs_no_write(recorded):
    """At TP=4 the toy's 6 MXFP4 blocks go 2, 2, 2 and none to the last rank."""
    recording = recorded()
    rank = dataclasses.replace(recording.first, placement=Placement(3, 4))
    shape = (8, 256, 128)
    states = tuple(
        dataclasses.replace(s, shape=shape) if s.part == "w13_weight" and s.stage == "before" else s
        for s in rank.states
    )
    rows = tuple(row for row in rank.ledger.rows if not row.parameter.endswith("w13_weight"))
    rank = dataclasses.replace(rank, states=states, ledger=Ledger(rows, rank.ledger.offered))
    coverage = load_coverage(Recording(recording.path, (rank,)))
    weights = [p for p in coverage.parameters if p.parameter.endswith("w13_weight")]
    assert {(p.required, p.status) for p in weights} == {(0, "once")}


def test_looking_at_nothing_is_an_error():
    assert LoadCoverage((), (), {}).verdict.verdict == "error"


def test_results_can_be_looked_at(recorded):
    coverage = load_coverage(recorded())
    assert len(coverage.to_frame()) == 63
    assert "written exactly once" in coverage._repr_html_()

"""The search among edits of a chain, on tensors; real loads with planted faults are in test_selftest."""

import pytest
import torch

from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path
from gptoss_debug.diagnosis.edits import edits, result_of
from gptoss_debug.diagnosis.search import Case, explain
from gptoss_debug.layouts.catalog import BACKENDS, Placement, chain_for

A, B = Checkpoint.open(toy_path("A")), Checkpoint.open(toy_path("B"))
PARTS = ["w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias"]


def case(part, live=None, *, backend="marlin", placement=Placement(), previous=None, expert=3, layer=1):
    chain = chain_for(part, "mxfp4", BACKENDS[backend], A.config, placement)
    if live is None:
        live = chain.forward(A.read_expert(layer, part, slice(expert, expert + 1)))
    return Case(layer, part, expert, live, chain, A, previous)


def bits(tensor):
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("backend", ["marlin", "raw"])
@pytest.mark.parametrize("placement", [Placement(), Placement(0, 2), Placement(1, 2)], ids=str)
def test_every_edit_of_every_chain_is_found_again(part, backend, placement):
    right = case(part, backend=backend, placement=placement)
    source = right.source()
    tried = 0
    for edit in edits(part, right.chain):
        live = result_of(edit, source)
        if live is None or (live.shape == right.live.shape and torch.equal(bits(live), bits(right.live))):
            continue  # the edit cannot be done, or changes nothing
        cause, _ = explain(case(part, live, backend=backend, placement=placement), budget=0.5)
        tried += 1
        if live.shape == right.live.shape and live.dtype == right.live.dtype:
            assert cause.explained == 1.0, edit
            # Another edit may give the same bytes; then both are named.
            assert edit.cause in cause.words or cause.class_id in {"E1", "C1", "D3"}, (edit.cause, cause)
        else:
            assert cause.class_id in {"B2", "unknown"}
    assert tried or backend == "raw"


@pytest.mark.parametrize("part", PARTS)
def test_what_is_right_has_no_cause(part):
    assert explain(case(part))[0].class_id == "none"


def test_two_changes_are_found_in_time():
    right = case("w13_bias")
    exchanged = right.source().unflatten(1, (-1, 2)).flip(2).flatten(1)
    twice = case("w13_bias", right.chain.steps[-1].forward(right.chain.forward(exchanged)))
    cause, edit = explain(twice)
    assert cause.explained == 1.0
    assert edit.depth == 2
    assert "exchanged" in cause.words
    assert "permute bias" in cause.words


def test_what_fits_nothing_is_unknown_with_the_nearest_and_its_share():
    right = case("w13_bias")
    live = right.live.clone()
    live[0, :384] = torch.randn(384).bfloat16()
    cause, edit = explain(case("w13_bias", live), budget=0.2)
    assert cause.class_id == "unknown"
    assert edit is None
    assert 0 <= cause.explained < 1
    noise = right.live.clone()
    noise[0, 5] += 1  # one element: too small a region to name a cause by
    assert explain(case("w13_bias", noise), budget=0.2)[0].class_id == "unknown"


def test_a_region_that_keeps_the_previous_values_is_named_with_its_rows():
    right = case("w2_bias")
    old = right.chain.forward(B.read_expert(1, "w2_bias", slice(3, 4)))
    rows = right.chain.unwind(right.live).values.clone()
    rows[:, 64:128] = right.chain.unwind(old).values[:, 64:128]
    mixed = right.chain.rewind(rows)
    cause, _ = explain(case("w2_bias", mixed, previous=B))
    assert cause.class_id == "E2"
    assert 64 <= cause.region[0] < cause.region[1] == 128  # A and B agree in some rows
    assert explain(case("w2_bias", mixed), budget=0.2)[0].class_id == "unknown"  # B is not known


def test_a_weight_of_another_form_is_named_by_the_step_it_stopped_at():
    right = case("w13_weight")
    raw = right.source().flatten(2)
    padded = torch.nn.functional.pad(raw, (0, 128 - 80, 0, 512 - 384))
    cause, _ = explain(case("w13_weight", padded))
    assert cause.class_id == "B2"
    assert "the steps from 'tile' on are missing" in cause.words
    cause, _ = explain(case("w13_weight", raw[:, :, :-1]))
    assert cause.class_id == "unknown"
    assert "should be int32 [16, 1024]" in cause.words


def test_dirty_padding_is_told_from_wrong_values():
    right = case("w13_bias")
    dirty = right.live.clone()
    dirty[0, -1] = 3
    assert explain(case("w13_bias", dirty))[0].class_id == "C1"

"""What is made of the oracles' results; the oracles themselves are asked in test_sync_engine and notebook 04."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch

from gptoss_debug.checkpoints.toy import toy_path
from gptoss_debug.engines.vllm_adapter import joined_rank
from gptoss_debug.reports.sync_plots import plot_sync_faults
from gptoss_debug.sync import oracles
from gptoss_debug.sync.loaders import tensors_of
from gptoss_debug.sync.oracles import ADDRESSES, PADDING, WARM, WRITTEN, Trial
from gptoss_debug.sync.proof import Proof, Texts
from gptoss_debug.sync.results import Finding, OracleResult

mpl.use("agg")
SINKS = ("model.layers.0.attn.sinks", "model.layers.1.attn.sinks")


@pytest.fixture
def proof():
    def result(oracle, *findings):
        return OracleResult(oracle, "fault" if findings else "pass", "says <this>", tuple(findings))

    stale = [Finding(WARM, "E2", "keeps its old values", SINKS, rank) for rank in (0, 1)]
    dirty = Finding(WARM, "C1", "padding", ("model.layers.2.mlp.experts.routed_experts.w2_bias",), 1)
    good = [result(WARM), result(PADDING)]
    bad = [result(WARM, stale[0]), result(PADDING), result(WARM, stale[1], dirty), result(PADDING)]
    environment = {
        "python": "3", "torch": "2", "vllm": "0", "transformers": "5", "gptoss_debug": "0", "device": "cpu",
        "kernels": "emulated",
    }  # fmt: skip
    return Proof({"fixed": tuple(good), "reload_weights": tuple(bad)}, {}, "mxfp4", "marlin", 2, environment)


def test_the_table_shows_the_worst_of_all_ranks(proof):
    frame = proof.to_frame()
    assert list(frame.columns) == ["fixed", "reload_weights"]
    assert frame.loc[WARM].tolist() == ["ok: says <this>", "FAULT: says <this>"]
    assert frame.loc[PADDING].tolist() == ["ok: says <this>"] * 2
    assert "says &lt;this&gt;" in proof._repr_html_()
    assert "<this>" not in proof._repr_html_()


def test_the_verdict_names_tensors_ranks_and_classes(proof):
    verdict = proof.verdict
    assert verdict.verdict == "fault"
    assert "fixed: right in all 2; reload_weights: wrong in 1 of 2 oracles (C1, E2)" in verdict.headline
    assert [finding["sentence"] for finding in verdict.findings] == [
        "[E2] reload_weights, warm A->B equals cold B: ranks 0-1, layers 0-1, attn.sinks: keeps its old values.",
        "[C1] reload_weights, warm A->B equals cold B: rank 1, layer 2, mlp.experts.routed_experts.w2_bias: padding.",
    ]
    assert Proof({}, {}, "mxfp4", "marlin", 1, proof.environment).verdict.verdict == "error"


def test_the_figure_marks_each_wrong_tensor(proof):
    ax = plot_sync_faults(proof)
    letters = [text.get_text() for text in ax.texts]
    assert letters.count("s") == 2
    assert letters.count("p") == 1
    labels = [text.get_text() for text in ax.get_legend().texts]
    assert labels == ["same bits as cold B", "keeps A's values (s, class E2)", "padding not zero (p, class C1)"]
    plt.close("all")


def test_texts_are_compared_with_those_of_a_cold_start():
    assert Texts(("p",), ("a",), ("b",), ("b",), "").result().outcome == "pass"
    assert Texts(("p",), ("a",), ("b",), ("a",), "").result().says == "1 of 1 texts differ"
    assert Texts(("p",), ("a",), ("b",), ("b",), "KeyError").result().says == "raises KeyError"


class TestEveryOracleCanSayNo:
    """A right loader, spoilt in one way at a time; the oracle in question must notice, by its class."""

    @pytest.fixture(scope="class")
    def load(self):
        with joined_rank(toy_path("A")) as load:
            yield load

    @pytest.fixture
    def ask(self, load, monkeypatch):
        def ask(spoil, part="_warm"):
            right = oracles.load_into

            def spoilt(loader, model, config, weights):
                before = {name: p.data.clone() for name, p in model.named_parameters()}
                right(loader, model, config, weights)
                spoil(model, before)

            monkeypatch.setattr(oracles, "load_into", spoilt)
            sent = [list(tensors_of(toy_path(variant))) for variant in "AB"]
            trial = Trial(load, toy_path("A"), toy_path("B"), *sent, "fixed", 0)
            results = getattr(trial, part)()
            found = results if isinstance(results, list) else [results]
            return {result.oracle: [f.class_id for f in result.findings] for result in found}

        return ask

    EXPERTS = "model.layers.1.mlp.experts.routed_experts"

    def test_nothing_is_wrong_with_a_right_loader(self, ask):
        assert not any(ask(lambda model, before: None).values())

    def test_a_tensor_that_keeps_its_value(self, ask):
        name = "model.layers.3.attn.sinks"
        said = ask(lambda model, before: model.get_parameter(name).data.copy_(before[name]))
        assert said[WARM] == ["E2"]

    def test_dirty_padding(self, ask):
        def spoil(model, before):
            model.get_parameter(f"{self.EXPERTS}.w13_bias").data[:, -1] = 1

        assert ask(spoil)[PADDING] == ["C1"]

    def test_a_bias_out_of_order(self, ask):
        def spoil(model, before):
            bias = model.get_parameter(f"{self.EXPERTS}.w2_bias").data
            bias.copy_(bias[:, torch.arange(256) ^ 2])

        said = ask(spoil)
        assert said[WARM] == ["B1"]

    def test_a_weight_in_another_layout(self, ask):
        def spoil(model, before):
            weight = model.get_parameter(f"{self.EXPERTS}.w13_weight").data
            weight.copy_(weight.flip(0))

        assert ask(spoil)[WARM] == ["B2"]

    def test_a_storage_that_moves(self, ask):
        def spoil(model, before):
            norm = model.get_parameter("model.norm.weight")
            norm.data = norm.data.clone()

        assert ask(spoil)[ADDRESSES] == ["F1"]

    def test_a_region_that_is_never_written(self, ask):
        def spoil(model, before):
            model.get_parameter("model.norm.weight").data.copy_(before["model.norm.weight"])

        assert ask(spoil, "_sentinel")[WRITTEN] == ["E1"]

    def test_a_hidden_packed_weight_that_is_stale(self, ask):
        def spoil(model, before):
            head, other = model.lm_head, model.model.embedding
            head.cpu_linear = other.cpu_linear

        assert "F3" in ask(spoil)[WARM]

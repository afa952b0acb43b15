import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path
from gptoss_debug.diagnosis.compare import compare_recording
from gptoss_debug.diagnosis.coverage import load_coverage
from gptoss_debug.reports import plots

mpl.use("agg")


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_the_timeline_shows_every_write_and_circles_the_bypassed_ones(recorded):
    _, given = plt.subplots()
    ax = plots.plot_load_timeline(recorded().ledger, ax=given)
    assert ax is given
    points = [len(collection.get_offsets()) for collection in ax.collections]
    assert points == [8, 8, 8, 55, 4]
    assert ax.get_xlabel() == "time since load_weights began [ms]"
    assert ax.get_ylabel() == "layer"


def test_the_coverage_map_has_a_cell_for_each_parameter_and_layer(recorded):
    ax = plots.plot_coverage(load_coverage(recorded(tp=2)), rank=1)
    assert ax.images[0].get_array().shape == (15, 4)
    assert [text.get_text() for text in ax.texts].count("1 ●") == 4
    assert "rank 1" in ax.get_title("left")


def test_the_comparison_map_colours_what_differs(recorded):
    exact = plots.plot_comparison(compare_recording(recorded(), Checkpoint.open(toy_path()), progress=False))
    assert [text.get_text() for text in exact.get_legend().texts] == ["exact"]
    other = plots.plot_comparison(compare_recording(recorded(tp=2), Checkpoint.open(toy_path("B")), progress=False))
    assert "differs (x)" in [text.get_text() for text in other.get_legend().texts]
    assert other.images[0].get_array().shape[0] == 8


def test_the_permutation_pictures(recorded):
    rank = recorded().first
    axes = plots.plot_repack(rank.tensor(0, "w13_weight", "before"))
    assert [ax.images[0].get_array().shape for ax in axes] == [(64, 16), (32, 32)] * 2
    assert len(set(axes[1].images[0].get_array().flatten().tolist())) == 64
    before, after = (rank.tensor(0, "w13_bias", stage)[0] for stage in ("before", "after"))
    left, right = plots.plot_bias_permutation(before, after)
    assert len(left.lines) == 32
    assert sorted(right.lines[0].get_ydata()) == sorted(right.lines[1].get_ydata())

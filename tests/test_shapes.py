import pytest

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts.shapes import explain_shapes, parse_shape

CONFIG = ModelConfig.named("gpt-oss-20b")


def test_the_first_report_is_explained_from_shapes_and_config():
    explained = explain_shapes((32, 192, 6144), (32, 2880, 2880), CONFIG, tp=2)
    live, sent = explained.readings[0]
    assert (live.part, live.backend, live.tp) == ("w13_weight", "marlin", 2)
    assert (sent.part, sent.source, sent.backend) == ("w13_weight", "bf16", "bf16")
    assert [line.split(":")[0] for line in explained.between] == ["quantise", "pad", "pad", "tile", "pack"]
    assert explained.kinds == ("format", "padding", "layout")
    assert "mismatch is one of format, padding and layout" in str(explained)
    assert "could also be w2_weight (BF16 down_proj)" in str(explained)


def test_order_does_not_matter():
    one = explain_shapes((32, 192, 6144), (32, 2880, 2880), CONFIG, tp=2)
    other = explain_shapes((32, 2880, 2880), (32, 192, 6144), CONFIG, tp=2)
    assert one.between == other.between


def test_from_checkpoint_to_kernel():
    explained = explain_shapes((32, 192, 11776), (32, 5760, 90, 16), CONFIG)
    assert str(explained.readings[0][1]) == "w13_weight (MXFP4 gate_up_proj_blocks, as in the checkpoint)"
    assert explained.between[0].startswith("flatten blocks: [32, 5760, 90, 16] -> [32, 5760, 1440]")
    assert explained.between[-1].split("   ")[0] == "pack: [32, 192, 47104] -> [32, 192, 11776]"


def test_equal_shapes_have_nothing_between_them():
    explained = explain_shapes((32, 5760), (32, 5760), CONFIG)
    assert explained.between == ()
    assert "No step lies between them" in str(explained)


def test_a_shape_of_another_number_of_ranks_is_named():
    explained = explain_shapes((32, 192, 3072), (32, 2880, 5760), CONFIG, tp=2)
    assert explained.readings == ()
    assert "at TP=4 it is w13_weight" in str(explained)


def test_the_smaller_share_of_the_last_rank_is_known():
    explained = explain_shapes((32, 1344, 1440), (32, 5760, 1440), CONFIG, tp=4)
    assert "cut to rows 4416:5760" in str(explained.readings[0][0])


def test_sizes_that_mxfp4_cannot_hold_are_still_explained_unquantised():
    config = ModelConfig(100, 200, 4, 2, 4, 2, 64, 100)
    explained = explain_shapes((4, 400, 100), (4, 100, 400), config)
    assert explained.readings[0][0].backend == "bf16"


def test_a_shape_of_another_model_is_named():
    explained = explain_shapes((8, 2880, 2880), (32, 7, 9), CONFIG)
    assert "its first axis is 8, and the model has 32 experts" in explained.unknown[0]
    assert "nor at any of TP=" in explained.unknown[1]


@pytest.mark.parametrize("text", ["[32,192,6144]", "(32, 192, 6144)", "32x192x6144", " 32 192 6144 ", "[32, 192,6144]"])
def test_shapes_are_read_as_people_write_them(text):
    assert parse_shape(text) == (32, 192, 6144)


@pytest.mark.parametrize("text", ["", "[]", "[32,-1]", "a,b", "[32,0]", "32;2"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(LayoutError, match="is no shape"):
        parse_shape(text)

import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import PARTS
from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts import marlin, mxfp4
from gptoss_debug.layouts.catalog import (
    BACKENDS,
    Placement,
    backend,
    chain_for,
    chains,
    check_parallel,
    checkpoint_shape,
    value_chain,
)
from gptoss_debug.layouts.chain import Chain, merge
from gptoss_debug.layouts.steps import Pad, Rearrange, Shard

configs = st.builds(
    lambda experts, hidden, inner: ModelConfig(hidden * 32, inner * 32, experts * 4, 2, 4, 2, 64, 100),
    st.integers(1, 2),
    st.integers(1, 9),
    st.integers(1, 9),
)


def random_tensor(part, source, config):
    shape, dtype = checkpoint_shape(part, source, config)
    if dtype is torch.uint8:
        return torch.randint(0, 255, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


@settings(deadline=None, max_examples=25)
@given(configs, st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from(["marlin", "raw"]), st.integers(0, 9999))
def test_all_ranks_together_give_the_mxfp4_checkpoint_back(config, size, expert_parallel, kind, seed):
    torch.manual_seed(seed)
    for part in PARTS:
        tensor = random_tensor(part, "mxfp4", config)
        made = [
            chain_for(part, "mxfp4", BACKENDS[kind], config, Placement(rank, size, expert_parallel))
            for rank in range(size)
        ]
        live = [chain.forward(tensor) for chain in made]
        assert torch.equal(merge(made, live), tensor.flatten(2) if part.endswith("_weight") else tensor)
        for chain, one in zip(made, live, strict=True):
            unwound = chain.unwind(one)
            assert torch.equal(unwound.values, chain.expected(tensor))
            assert unwound.dirty == 0


@settings(deadline=None, max_examples=15)
@given(configs, st.sampled_from([1, 2]), st.integers(0, 9999))
def test_bf16_experts_go_through_quantisation_with_their_values(config, size, seed):
    torch.manual_seed(seed)
    for weight, scale in (("w13_weight", "w13_weight_scale"), ("w2_weight", "w2_weight_scale")):
        values = mxfp4.encode(random_tensor(weight, "bf16", config).transpose(1, 2)).decode(torch.bfloat16)
        tensor = values.transpose(1, 2).contiguous()
        for rank in range(size):
            place = Placement(rank, size)
            codes, scales = (chain_for(part, "bf16", BACKENDS["marlin"], config, place) for part in (weight, scale))
            decoded = mxfp4.decode(
                codes.unwind(codes.forward(tensor)).values, scales.unwind(scales.forward(tensor)).values
            )
            wanted = value_chain(weight, BACKENDS["marlin"], config, place).forward(tensor)
            assert torch.equal(decoded, wanted.float())


@settings(deadline=None, max_examples=15)
@given(configs, st.sampled_from([1, 2]), st.sampled_from(["bf16", "bf16_cpu"]))
def test_unquantised_chains_are_undone_too(config, size, kind):
    for part, chain in chains("bf16", BACKENDS[kind], config, Placement(size - 1, size)).items():
        tensor = random_tensor(part, "bf16", config)
        assert torch.equal(chain.unwind(chain.forward(tensor)).values, chain.expected(tensor))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9999))
def test_tile_and_pack_are_the_code_pattern(kt, nt, seed):
    codes = torch.randint(0, 16, (16 * kt, 64 * nt), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    tiled = Chain(marlin.WEIGHT).forward(mxfp4.pack_codes(codes.T.contiguous())[None])
    assert tiled.shape == (1, kt, 128 * nt)
    assert torch.equal(
        mxfp4.unpack_codes(tiled.view(torch.uint8)[0]), rearrange(codes, marlin.CODE_PATTERN, **marlin.CODE_SIZES)
    )


def test_patterns_agree_with_vllms_own_python():
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4
    from vllm.model_executor.layers.quantization.utils import marlin_utils_test as reference

    codes = torch.randint(0, 16, (192, 320), dtype=torch.uint8)
    theirs = reference.marlin_weights(codes.int(), 192, 320, 4, reference.get_weight_perm(4))
    assert torch.equal(Chain(marlin.WEIGHT).forward(mxfp4.pack_codes(codes.T.contiguous())[None])[0], theirs)

    scales = torch.randint(0, 255, (320, 6), dtype=torch.uint8)
    permuted = marlin_utils.marlin_permute_scales(scales.T.view(torch.float8_e8m0fnu).bfloat16(), 192, 320, 32)
    theirs = marlin_utils_fp4.mxfp4_marlin_process_scales(permuted)
    assert torch.equal(Chain(marlin.SCALE).forward(scales[None])[0].view(torch.uint8), theirs.view(torch.uint8))

    bias = torch.randn(320, dtype=torch.bfloat16)
    assert torch.equal(Chain(marlin.BIAS).forward(bias[None])[0], marlin_utils.marlin_permute_bias(bias))


def test_the_bias_pattern_is_its_own_inverse_and_keeps_eight_places():
    bias = torch.arange(64).view(1, 64)
    once = Chain(marlin.BIAS).forward(bias)
    assert torch.equal(Chain(marlin.BIAS).forward(once), bias)
    assert (once == bias)[0, :32].nonzero().flatten().tolist() == [0, 1, 10, 11, 20, 21, 30, 31]


@pytest.mark.parametrize(
    ("tp", "w13", "w2"),
    [
        (1, (32, 192, 11776), (32, 184, 6144)),
        (2, (32, 192, 6144), (32, 96, 6144)),
        (4, (32, 192, 3072), (32, 48, 6144)),
    ],
)
def test_shapes_of_gpt_oss_20b(tp, w13, w2):
    config = ModelConfig.named("gpt-oss-20b")
    for part, shape in (("w13_weight", w13), ("w2_weight", w2)):
        for source in ("mxfp4", "bf16"):
            chain = chain_for(part, source, BACKENDS["marlin"], config, Placement(tp - 1, tp))
            assert chain.shapes(*checkpoint_shape(part, source, config))[-1] == shape


def test_gpt_oss_20b_is_cut_into_whole_blocks_at_tp_4():
    """90 blocks: 23, 23, 23 and 21 of 32, as vLLM's loader cuts them."""
    config, shares = ModelConfig.named("gpt-oss-20b"), []
    for rank in range(4):
        for part, axis in (("w13_weight", 1), ("w2_weight", 2)):
            chain = chain_for(part, "mxfp4", BACKENDS["marlin"], config, Placement(rank, 4))
            (shard,) = [step for step in chain.steps if isinstance(step, Shard)]
            assert shard.axis == axis
            shares.append((shard.start, shard.stop))
    assert shares[::2] == [(0, 1472), (1472, 2944), (2944, 4416), (4416, 5760)]
    assert shares[1::2] == [(0, 368), (368, 736), (736, 1104), (1104, 1440)]


def test_the_down_bias_is_on_the_first_rank_only():
    config = ModelConfig(160, 192, 8, 4, 4, 2, 64, 640)
    bias = torch.randn(8, 160).bfloat16()
    first, second = (chain_for("w2_bias", "mxfp4", BACKENDS["marlin"], config, Placement(r, 2)) for r in (0, 1))
    assert first.forward(bias).count_nonzero() > 0
    assert second.forward(bias).count_nonzero() == 0


def test_dirty_padding_is_counted():
    config = ModelConfig(160, 192, 8, 4, 4, 2, 64, 640)
    chain = chain_for("w13_bias", "mxfp4", BACKENDS["marlin"], config)
    live = chain.forward(torch.randn(8, 384).bfloat16())
    live[3, 500] = 1.0
    unwound = chain.unwind(live)
    assert unwound.dirty > 0
    assert sum(int(pad[3].count_nonzero()) for _, pad in unwound.padding) == 1


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(LayoutError, match="step 'tile' does not fit"):
        Chain(marlin.WEIGHT).forward(torch.zeros(1, 63, 8, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="axis 1 does not fit the padding; expected 4"):
        Pad(1, 4, 8).forward(torch.zeros(2, 5))
    with pytest.raises(LayoutError, match="too short"):
        Shard(1, 2, 9, "rows").forward(torch.zeros(2, 5))
    with pytest.raises(LayoutError, match="all ranks"):
        Shard(1, 2, 9, "rows").inverse(torch.zeros(2, 5))
    with pytest.raises(LayoutError, match="triton: no layout is known"):
        backend("triton")
    assert backend("marlin", None).name == "marlin"
    with pytest.raises(LayoutError, match=r"0\.12 or later"):
        backend("marlin", (0, 11, 0))
    with pytest.raises(LayoutError, match="holds no w13_weight_scale"):
        chain_for("w13_weight_scale", "bf16", BACKENDS["bf16"], ModelConfig.named("gpt-oss-20b"))


@pytest.mark.parametrize(
    ("tp", "named"), [(3, "num_attention_heads 4"), (4, "num_key_value_heads 2"), (0, "num_attention_heads")]
)
def test_ranks_that_do_not_divide_are_refused(toy, tp, named):
    with pytest.raises(LayoutError, match=named):
        check_parallel(toy.config, tp)


def test_merge_notices_a_gap():
    config = ModelConfig(160, 192, 8, 4, 4, 2, 64, 640)
    chain = chain_for("w13_bias", "mxfp4", BACKENDS["raw"], config, Placement(1, 2))
    live = chain.forward(torch.randn(8, 384).bfloat16())
    with pytest.raises(LayoutError, match="rank 0 does not follow"):
        merge([chain, chain], [live, live])


def test_a_chain_describes_itself():
    chain = chain_for("w13_weight", "bf16", BACKENDS["marlin"], ModelConfig.named("gpt-oss-20b"), Placement(1, 2))
    assert str(chain) == "transpose -> quantise -> shard -> pad -> pad -> tile -> pack"
    assert list(chain.to_frame().step) == [step.name for step in chain.steps]
    assert "rows 2880:5760" in chain._repr_html_()
    assert Rearrange("x", "a b -> b a").describe() == "`a b -> b a`"

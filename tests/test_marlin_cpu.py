import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_debug.engines import marlin_cpu
from gptoss_debug.errors import EngineError
from gptoss_debug.layouts import marlin, mxfp4
from gptoss_debug.layouts.chain import Chain


def experts(count, rows, columns):
    """Return random experts: values ``[E, N, K]``, and weight, scale and bias as Marlin keeps them."""
    codes = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8)
    scales = torch.randint(118, 128, (count, rows, columns // 32), dtype=torch.uint8)
    bias = torch.randn(count, rows).bfloat16()
    packed = (
        Chain(marlin.WEIGHT).forward(codes), Chain(marlin.SCALE).forward(scales), Chain(marlin.BIAS).forward(bias),
    )  # fmt: skip
    return mxfp4.decode(codes, scales), bias, packed


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 20), st.integers(1, 4), st.sampled_from([8, 16]), st.booleans(), st.integers(0, 9999))
def test_the_gemm_is_a_product_with_each_tokens_experts(tokens, top_k, block, weighted, seed):
    torch.manual_seed(seed)
    values, bias, (weight, scale, marlin_bias) = experts(6, 128, 256)
    hidden = torch.randn(tokens, 256).bfloat16()
    ids = torch.stack([torch.randperm(6)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k)
    length = ids.numel() + 6 * (block - 1)
    pairs, blocks = torch.empty(length, dtype=torch.int32), torch.empty(length, dtype=torch.int32)
    filled = torch.empty(1, dtype=torch.int32)
    marlin_cpu.align_block_size(ids, 6, block, pairs, blocks, filled)
    assert int(filled) % block == 0
    out = marlin_cpu.moe_gemm(
        hidden, None, weight, marlin_bias, scale, None, None, None, torch.zeros(1), pairs, blocks, filled, weights,
        block, top_k, weighted, 0, tokens, 128, 256, False, True, False,
    )  # fmt: skip
    for token in range(tokens):
        for slot in range(top_k):
            expert = ids[token, slot]
            wanted = values[expert] @ hidden[token].float() + bias[expert].float()
            wanted = wanted * weights[token, slot] if weighted else wanted
            torch.testing.assert_close(out[token * top_k + slot].float(), wanted, rtol=1e-2, atol=1e-3)


def test_pairs_of_another_ranks_experts_are_left_out():
    ids = torch.tensor([[0, 2], [3, 1]])
    expert_map = torch.tensor([-1, 0, 1, -1])
    pairs, blocks, filled = torch.empty(16, dtype=torch.int32), torch.empty(4, dtype=torch.int32), torch.empty(1)
    marlin_cpu.align_block_size(ids, 4, 4, pairs, blocks, filled, expert_map)
    assert int(filled) == 8
    assert pairs[:8].tolist() == [3, 4, 4, 4, 1, 4, 4, 4]
    assert blocks[:2].tolist() == [0, 1]
    output = torch.empty(2, 3)
    marlin_cpu.moe_sum(torch.full((2, 2, 3), torch.nan).index_fill(0, torch.tensor([0]), 2.0), output,
                       torch.tensor([[0, 2], [1, 1]]), torch.tensor([0, -1, 1]))  # fmt: skip
    assert output.tolist() == [[4.0] * 3, [0.0] * 3]


def test_swiglu_is_that_of_transformers():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    theirs = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=8, intermediate_size=8))
    gate_up = torch.randn(50, 64) * 8
    out = torch.empty(50, 32)
    marlin_cpu.swigluoai(out, gate_up)
    torch.testing.assert_close(out, theirs._apply_gate(gate_up))


def test_formats_without_a_cpu_implementation_are_refused():
    with pytest.raises(EngineError, match="no CPU implementation"):
        marlin_cpu.repack(lambda *args: None, torch.zeros(1))(torch.zeros(2, 64, dtype=torch.int32), 16, 64, 8)
    with pytest.raises(EngineError, match="scatter_idx"):
        marlin_cpu.align_block_size(*[torch.zeros(1)] * 6, None, torch.zeros(1))


def test_the_registered_gemm_can_be_traced():
    """Users do not always say enforce_eager: torch.compile must know the operation's shape."""
    from gptoss_debug.engines.vllm_cpu import prepare_process

    assert prepare_process()
    _, _, (weight, scale, bias) = experts(2, 128, 256)
    hidden, weights = torch.randn(3, 256).bfloat16(), torch.rand(3, 2)
    pairs, blocks, filled = torch.empty(20, dtype=torch.int32), torch.empty(20, dtype=torch.int32), torch.empty(1)
    marlin_cpu.align_block_size(torch.tensor([[0, 1]] * 3), 2, 8, pairs, blocks, filled)
    arguments = (
        hidden, None, weight, bias, scale, None, None, None, torch.zeros(1), pairs, blocks, filled, weights,
        8, 2, True, 0, 3, 128, 256, False, True, False, -1, -1, -1,
    )  # fmt: skip
    assert torch.ops._moe_C.moe_wna16_marlin_gemm(*arguments).shape == (6, 128)
    torch.library.opcheck(torch.ops._moe_C.moe_wna16_marlin_gemm, arguments, test_utils="test_faketensor")

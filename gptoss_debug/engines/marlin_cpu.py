"""CPU implementations of the operations that vLLM's Marlin MoE path needs and has only for CUDA.

Each works on the very bytes that the CUDA kernel would read: the repack is vLLM's own Python reference,
and the GEMM decodes the repacked tensors at every call, so that a wrong byte gives a wrong number here
too. On an H200 the CUDA kernels agree with such a decode to 0.4 to 0.5 % relative L2 (their bf16
rounding). These are for understanding weights, not for speed; ``vllm_adapter`` registers them, on CPU
platforms only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from gptoss_debug.errors import EngineError
from gptoss_debug.layouts import marlin, mxfp4
from gptoss_debug.layouts.chain import Chain

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0

_WEIGHT, _SCALE, _BIAS = Chain(marlin.WEIGHT), Chain(marlin.SCALE), Chain(marlin.BIAS)


def repack(reference: Callable[..., torch.Tensor], permutation: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return ``_C::gptq_marlin_repack``: GPTQ-packed codes to Marlin tiles.

    Parameters
    ----------
    reference, permutation
        vLLM's ``marlin_permute_weights`` and its permutation of 4-bit codes: ``[K, N]`` to ``[K / 16, 16 N]``.
        They are vLLM's own, so that a probe of the layout does not measure this package.
    """

    def gptq_marlin_repack(
        b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
    ) -> torch.Tensor:
        """``[K / 8, N]`` int32, eight consecutive-K codes a word, to ``[K / 16, 2 N]`` int32."""
        if num_bits != 4 or is_a_8bit:
            raise EngineError("this repack has no CPU implementation", expected="4-bit codes, 16-bit inputs")
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = ((b_q_weight.unsqueeze(1) >> shifts.view(1, 8, 1)) & 0xF).to(torch.uint8).reshape(size_k, size_n)
        return mxfp4.pack_codes(reference(codes, size_k, size_n, permutation)).view(torch.int32)

    return gptq_marlin_repack


def moe_gemm(
    input: torch.Tensor,
    output: torch.Tensor | None,
    b_qweight: torch.Tensor,
    b_bias: torch.Tensor | None,
    b_scales: torch.Tensor,
    a_scales: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    b_qzeros: torch.Tensor | None,
    workspace: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_past_padded: torch.Tensor,
    topk_weights: torch.Tensor,
    moe_block_size: int,
    top_k: int,
    mul_topk_weights: bool,
    b_q_type: int,
    size_m: int,
    size_n: int,
    size_k: int,
    use_atomic_add: bool,
    use_fp32_reduce: bool,
    is_zp_float: bool,
    thread_k: int = -1,
    thread_n: int = -1,
    blocks_per_sm: int = -1,
) -> torch.Tensor:
    """Multiply every (token, expert) pair with its expert: ``_moe_C::moe_wna16_marlin_gemm``, for MXFP4.

    Parameters
    ----------
    input : ``[M, K]`` bfloat16 or float16.
    output
        Left alone: the kernel writes there and returns it, vLLM uses what is returned, and torch.compile
        wants an operation that does not return its input.
    b_qweight : ``[E, K / 16, 2 N]`` int32, Marlin tiles.
    b_bias : ``[E, N]`` in Marlin order, or None.
    b_scales : ``[E, K / 32, N]`` float8_e8m0fnu in Marlin order.
    sorted_token_ids, expert_ids, num_tokens_past_padded
        As :func:`align_block_size` leaves them; pair ``p`` belongs to token ``p // top_k``.
    the others
        Concern the GPU's threads, or formats that are refused.

    Returns
    -------
    ``[M * top_k, N]`` of the inputs' dtype, accumulated in float32.
    """
    if a_scales is not None or global_scale is not None or b_qzeros is not None:
        raise EngineError("this Marlin GEMM has no CPU implementation", expected="MXFP4 weights, 16-bit inputs")
    rows = input.new_empty((size_m * top_k, size_n))
    weights = topk_weights.reshape(-1)
    pairs = sorted_token_ids[: int(num_tokens_past_padded)].view(-1, moe_block_size)
    experts = expert_ids[: pairs.shape[0]]
    for expert in experts.unique().tolist():
        chosen = pairs[experts == expert].flatten().long()
        chosen = chosen[chosen < size_m * top_k]
        if expert < 0:
            rows[chosen] = 0
            continue
        one = slice(expert, expert + 1)
        codes = _WEIGHT.unwind(b_qweight[one]).values
        values = mxfp4.decode(codes, _SCALE.unwind(b_scales[one]).values)[0]
        product = input[chosen // top_k].float() @ values[:, :size_k].T
        if b_bias is not None:
            product += _BIAS.unwind(b_bias[one]).values[0].float()
        if mul_topk_weights:
            product *= weights[chosen].unsqueeze(1)
        rows[chosen] = product.to(rows.dtype)
    return rows


def moe_gemm_shape(*arguments: Any, **named: Any) -> torch.Tensor:
    """Return an empty tensor of the shape that :func:`moe_gemm` returns, for torch.compile."""
    given = inspect.signature(moe_gemm).bind(*arguments, **named).arguments
    return given["input"].new_empty((given["size_m"] * given["top_k"], given["size_n"]))


def align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
) -> None:
    """Sort (token, expert) pairs by expert, each expert padded to whole blocks: ``_moe_C::moe_align_block_size``.

    Parameters
    ----------
    topk_ids : ``[M, top_k]``, global expert numbers.
    expert_map : ``[num_experts]``, global to local number, -1 for another rank's; such pairs are left out.
    sorted_token_ids, expert_ids, num_tokens_post_pad
        Outputs, written in place; padding slots hold ``M * top_k``.
    """
    if scatter_idx is not None:
        raise EngineError("moe_align_block_size with scatter_idx has no CPU implementation")
    flat = topk_ids.flatten().long()
    local = flat if expert_map is None else expert_map[flat].long()
    sorted_token_ids.fill_(flat.numel())
    filled = block = 0
    for expert in sorted(set(local.tolist()) - {-1}):
        pairs = (local == expert).nonzero().flatten()
        blocks = -(-pairs.numel() // block_size)
        sorted_token_ids[filled : filled + pairs.numel()] = pairs.int()
        expert_ids[block : block + blocks] = expert
        filled, block = filled + blocks * block_size, block + blocks
    num_tokens_post_pad.fill_(filled)


def moe_sum(
    pairs: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Add the ``top_k`` results ``[M, top_k, K]`` of each token into ``output [M, K]``: ``_moe_C::moe_sum``.

    Pairs of another rank's experts (``expert_map`` -1) were never computed and are left out.
    """
    if expert_map is not None and topk_ids is not None:
        here = expert_map[topk_ids.long()] >= 0
        pairs = torch.where(here.unsqueeze(-1), pairs, torch.zeros((), dtype=pairs.dtype))
    output.copy_(pairs.float().sum(dim=1))


def swigluoai(
    output: torch.Tensor, gate_up: torch.Tensor, alpha: float = SWIGLU_ALPHA, limit: float = SWIGLU_LIMIT
) -> None:
    """GPT-OSS's clamped SwiGLU on interleaved columns (even gate, odd up): ``_C::swigluoai_and_mul``.

    ``(up + 1) * gate * sigmoid(alpha * gate)``, as in ``GptOssExperts`` of transformers.
    """
    gate = gate_up[..., ::2].float().clamp(max=limit)
    up = gate_up[..., 1::2].float().clamp(-limit, limit)
    output.copy_((up + 1) * gate * torch.sigmoid(alpha * gate))


def raw_experts(
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """Compute a MoE layer from experts in checkpoint order (vLLM's "emulation" backend, which wants a GPU).

    Parameters
    ----------
    hidden : ``[M, K]``
    w13, w2 : ``[E, 2 I, K / 2]`` and ``[E, K, I / 2]`` uint8; scales ``[E, N, K / 32]`` uint8.
    topk_weights, topk_ids : ``[M, top_k]``

    Returns
    -------
    ``[M, K]`` of the inputs' dtype.
    """
    local = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    output = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in sorted(set(local.flatten().tolist()) - {-1}):
        tokens, slots = (local == expert).nonzero(as_tuple=True)
        up = hidden[tokens].float() @ mxfp4.decode(w13[expert], w13_scale[expert]).T
        if w13_bias is not None:
            up += w13_bias[expert].float()
        inner = hidden.new_empty((len(tokens), up.shape[1] // 2))
        swigluoai(inner, up.to(hidden.dtype))
        down = inner.float() @ mxfp4.decode(w2[expert], w2_scale[expert]).T
        if w2_bias is not None:
            down += w2_bias[expert].float()
        output.index_add_(0, tokens, down * topk_weights[tokens, slots].unsqueeze(1))
    return output.to(hidden.dtype)

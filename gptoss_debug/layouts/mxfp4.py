"""MXFP4: 4-bit E2M1 codes in blocks of 32 that share one E8M0 scale.

Format: OCP Microscaling Formats (MX) v1.0, sections 5.3 (E2M1) and 5.4 (E8M0),
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
A byte holds two codes, the element with the even index in the low nibble, as GPT-OSS stores them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptoss_debug.errors import LayoutError

BLOCK = 32
"""Elements along the input dimension that share one scale."""

SCALE_BIAS = 127
"""An E8M0 scale byte ``s`` stands for ``2 ** (s - 127)``; 255 is NaN."""

SCALE_NAN = 255

E2M1_MAX_EXPONENT = 2
"""floor(log2(6)): 6 is the largest E2M1 value."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0 to 7; codes 8 to 15 are their negatives."""


def _code_table() -> torch.Tensor:
    return torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES))


def _byte_table() -> torch.Tensor:
    codes = torch.arange(256)
    table = _code_table()
    return torch.stack([table[codes & 0xF], table[codes >> 4]], dim=1)


def _scale_table() -> torch.Tensor:
    exponents = torch.arange(SCALE_NAN, dtype=torch.float64) - SCALE_BIAS
    return torch.cat([torch.pow(2.0, exponents), torch.tensor([torch.nan])]).float()


@dataclass(frozen=True)
class Mxfp4:
    """A quantised tensor.

    Attributes
    ----------
    codes : ``[..., K / 2]`` uint8, two E2M1 codes a byte.
    scales : ``[..., K / 32]`` uint8, E8M0.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def decode(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values, ``[..., K]``; see :func:`decode`."""
        return decode(self.codes, self.scales, dtype)


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values that codes and scales stand for.

    Parameters
    ----------
    codes : ``[..., K / 2]`` uint8
    scales : ``[..., K / 32]`` uint8 (or float8_e8m0fnu, viewed as bytes)
    dtype
        float32 is exact for every scale; bfloat16 is exact too, except where the result falls
        outside its range.

    Returns
    -------
    ``[..., K]`` of ``dtype``; a block whose scale is 255 is NaN.

    Raises
    ------
    LayoutError
        If the shapes do not belong together.
    """
    if codes.shape[:-1] != scales.shape[:-1] or codes.shape[-1] != scales.shape[-1] * BLOCK // 2:
        raise LayoutError(
            "codes and scales do not belong together",
            expected=f"scales {[*codes.shape[:-1], codes.shape[-1] * 2 / BLOCK]} for codes {list(codes.shape)}",
            found=list(scales.shape),
        )
    values = _byte_table().to(codes.device)[codes.view(torch.uint8).int()]
    factors = _scale_table().to(codes.device)[scales.view(torch.uint8).int()]
    blocks = values.reshape(*scales.shape, BLOCK) * factors.unsqueeze(-1)
    return blocks.flatten(-2).to(dtype)


def encode(values: torch.Tensor) -> Mxfp4:
    """Quantise to MXFP4: ``scale = 2 ** (floor(log2(amax)) - 2)``, codes rounded to nearest, ties to even.

    Values that MXFP4 represents exactly come back exactly from :meth:`Mxfp4.decode`, although the
    bytes may differ from those they were decoded from (a block whose largest code was below 4 has
    several spellings).

    Parameters
    ----------
    values : ``[..., K]`` of any float dtype, ``K`` a multiple of 32.

    Raises
    ------
    LayoutError
        If ``K`` is not a multiple of 32, or a value is NaN or infinite.
    """
    if values.shape[-1] % BLOCK:
        raise LayoutError(
            "the last axis cannot be cut into MXFP4 blocks",
            expected=f"a multiple of {BLOCK}",
            found=values.shape[-1],
        )
    packed = [_encode(piece) for piece in _pieces(values)]
    if any(piece is None for piece in packed):
        where = (~torch.isfinite(values)).nonzero()[0].tolist()
        raise LayoutError(
            "cannot be quantised to MXFP4",
            where=f"element {where}",
            expected="a finite value",
            found=values[tuple(where)].item(),
        )
    codes = torch.cat([piece.codes for piece in packed if piece is not None])
    scales = torch.cat([piece.scales for piece in packed if piece is not None])
    return Mxfp4(codes.view(*values.shape[:-1], -1), scales.view(*values.shape[:-1], -1))


_AT_ONCE = 1 << 18
"""Elements, 1 MiB of float32: the passes over them then run in a CPU's cache."""


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the rows of a tensor in pieces that fit a CPU's cache; on a GPU all of them at once."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows.split(max(1, _AT_ONCE // max(1, rows.shape[-1]))) if tensor.device.type == "cpu" else (rows,)


def _encode(values: torch.Tensor) -> Mxfp4 | None:
    """Quantise rows ``[N, K]``; None if one holds NaN or infinity."""
    blocks = values.float().unflatten(-1, (values.shape[-1] // BLOCK, BLOCK))
    amax = blocks.abs().amax(dim=-1)
    if not torch.isfinite(amax).all():
        return None
    # frexp gives amax = m * 2 ** e with m in [0.5, 1), so floor(log2(amax)) = e - 1, exactly.
    exponent = torch.frexp(amax).exponent - 1 - E2M1_MAX_EXPONENT
    biased = torch.where(amax > 0, exponent + SCALE_BIAS, 0).clamp(0, SCALE_NAN - 1)
    # Two factors, because 2 ** (127 - biased) alone can fall outside float32.
    shift = SCALE_BIAS - biased
    half = shift // 2
    scaled = blocks * torch.exp2(half.float()).unsqueeze(-1) * torch.exp2((shift - half).float()).unsqueeze(-1)
    codes = (_magnitude(scaled.abs()) + 8 * torch.signbit(scaled)).to(torch.uint8).reshape(values.shape)
    return Mxfp4(pack_codes(codes), biased.to(torch.uint8))


def _magnitude(scaled: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E2M1 magnitude and return its code, 0 to 7.

    Magnitudes lie 0.5 apart below 2, 1 apart below 4, then 2 apart, and in each range the code is the
    multiple of that distance plus a constant; ``round`` takes ties to the even multiple, whose mantissa bit
    is zero.
    """
    small, middle, large = torch.round(2 * scaled), torch.round(scaled).add_(2), torch.round(scaled / 2).add_(4)
    return torch.where(scaled < 2, small, torch.where(scaled < 4, middle, large)).clamp_(max=7)


def encode_like(values: torch.Tensor, old: Mxfp4) -> Mxfp4:
    """Quantise as :func:`encode` does, but keep the old bytes of every block that stands for the same values.

    A block whose largest code is below 4 has several spellings. A model that did not change comes back
    with its own, and a block that changed gets the one that :func:`encode` gives it, whatever was there.

    Parameters
    ----------
    values : ``[..., K]`` of any float dtype.
    old
        Codes ``[..., K / 2]`` and scales ``[..., K / 32]``.

    Raises
    ------
    LayoutError
        As :func:`encode` does.
    """
    new = encode(values)
    if torch.equal(new.codes, old.codes) and torch.equal(new.scales, old.scales):
        return new
    groups = (values, *(tensor.contiguous() for tensor in (new.codes, new.scales, old.codes, old.scales)))
    # Rows are cut alike in all five; the width of a row differs, so the cut goes by the values.
    counts = [len(piece) for piece in _pieces(values)]
    rows = [tensor.reshape(-1, tensor.shape[-1]).split(counts) for tensor in groups]
    kept = [_keep(*piece) for piece in zip(*rows, strict=True)]
    codes, scales = (torch.cat([getattr(piece, name) for piece in kept]) for name in ("codes", "scales"))
    return Mxfp4(codes.view(new.codes.shape), scales.view(new.scales.shape))


def _keep(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, old_codes: torch.Tensor, old_scales: torch.Tensor
) -> Mxfp4:
    """Return new rows, with the old bytes of blocks that stand for the same values."""
    bits = torch.int32  # -0.0 is another value than 0.0
    decoded = decode(old_codes, old_scales).view(bits)
    same = (decoded == values.float().contiguous().view(bits)).unflatten(-1, (-1, BLOCK)).all(dim=-1)
    kept, fresh = (tensor.unflatten(-1, (-1, BLOCK // 2)) for tensor in (old_codes, codes))
    chosen = torch.where(same.unsqueeze(-1), kept, fresh).flatten(-2)
    return Mxfp4(chosen, torch.where(same, old_scales, scales))


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack ``[..., K]`` codes (0 to 15, uint8) into ``[..., K / 2]`` bytes, even element in the low nibble."""
    pairs = codes.unflatten(-1, (codes.shape[-1] // 2, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Unpack ``[..., K / 2]`` bytes into ``[..., K]`` codes; the inverse of :func:`pack_codes`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)

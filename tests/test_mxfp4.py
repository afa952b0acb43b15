import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts import mxfp4


def reference_decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode element by element, as the format's text says."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    out = torch.empty(codes.numel() * 2)
    for i, byte in enumerate(codes.flatten().tolist()):
        for half, code in enumerate((byte & 15, byte >> 4)):
            sign = -1.0 if code & 8 else 1.0
            scale = 2.0 ** (int(scales.flatten()[(2 * i + half) // 32]) - 127)
            out[2 * i + half] = sign * magnitudes[code & 7] * scale
    return out.view(*codes.shape[:-1], -1)


@given(st.integers(0, 2**31), st.integers(0, 251))
def test_decode_agrees_with_the_format_text(seed, low):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (2, 3, 32), dtype=torch.uint8, generator=generator)
    scales = torch.randint(low, low + 2, (2, 3, 2), dtype=torch.uint8, generator=generator)
    assert torch.equal(mxfp4.decode(codes, scales), reference_decode(codes, scales))


def test_decode_agrees_with_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 64, 5, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 64, 5), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(mxfp4.decode(blocks.flatten(2), scales, torch.bfloat16), theirs.transpose(1, 2))


@given(st.integers(0, 2**31), st.integers(0, 246))
def test_every_mxfp4_value_survives_decode_and_encode(seed, low):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (2, 4, 32), dtype=torch.uint8, generator=generator)
    scales = torch.randint(low, low + 6, (2, 4, 2), dtype=torch.uint8, generator=generator)
    values = mxfp4.decode(codes, scales)
    assert torch.equal(mxfp4.encode(values).decode(), values)
    assert torch.equal(values.bfloat16().float(), values)


@given(st.lists(st.floats(-6, 6, width=32), min_size=31, max_size=31))
def test_encode_rounds_to_the_nearest_value(numbers):
    values = torch.tensor([[*numbers, 6.0]])  # amax 6 fixes the scale at 1
    decoded = mxfp4.encode(values).decode()
    grid = torch.tensor(mxfp4.E2M1_VALUES)
    best = (values.abs().unsqueeze(-1) - grid).abs().amin(-1)
    assert torch.equal((values - decoded).abs(), best)


@pytest.mark.parametrize(
    ("tie", "even"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
)
def test_ties_go_to_the_even_code(tie, even):
    values = torch.zeros(1, 32)
    values[0, :3] = torch.tensor([6.0, tie, -tie])
    assert mxfp4.encode(values).decode()[0, 1:3].tolist() == [even, -even]


def test_the_sign_of_zero_is_kept():
    values = torch.tensor([[-0.0] * 16 + [0.0] * 15 + [1.0]])
    assert torch.equal(torch.signbit(mxfp4.encode(values).decode()), torch.signbit(values))


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda c: len(c) % 2 == 0))
def test_codes_survive_packing(codes):
    tensor = torch.tensor(codes, dtype=torch.uint8)
    assert torch.equal(mxfp4.unpack_codes(mxfp4.pack_codes(tensor)), tensor)
    assert int(mxfp4.pack_codes(tensor)[0]) & 15 == codes[0]


def test_a_nan_scale_is_nan():
    values = mxfp4.decode(torch.zeros(1, 16, dtype=torch.uint8), torch.full((1, 1), 255, dtype=torch.uint8))
    assert values.isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(bad):
    values = torch.zeros(2, 64)
    values[1, 40] = bad
    with pytest.raises(LayoutError, match=r"\[1, 40\].*finite"):
        mxfp4.encode(values)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(LayoutError, match="multiple of 32; found 33"):
        mxfp4.encode(torch.zeros(2, 33))
    with pytest.raises(LayoutError, match="do not belong together"):
        mxfp4.decode(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8))

"""Marlin's MXFP4 layout as three re-orderings.

Measured bit for bit against vLLM's Python reference (``marlin_utils_test.get_weight_perm``,
``marlin_utils.get_scale_perms``) and, on an H200 with vLLM 0.26.0, against the CUDA op
``_C::gptq_marlin_repack``. The tile pattern works on bytes of two codes; together with ``Pack`` it is,
for a matrix of single codes ``[K, N]``, :data:`CODE_PATTERN`.
"""

from __future__ import annotations

import torch

from gptoss_debug.layouts.steps import Pack, Rearrange, Step, View

HIDDEN_MULTIPLE = 256
"""Marlin pads the hidden size to a multiple of this (``mxfp4_round_up_hidden_size_and_intermediate_size``)."""

INTERMEDIATE_MULTIPLE = 128
"""... and the intermediate size of one rank to a multiple of this."""

CODE_PATTERN = "(kt b t p) (nt j h c) -> kt (nt c t j p h b)"
CODE_SIZES = {"b": 2, "t": 4, "p": 2, "j": 4, "h": 2, "c": 8}
"""16x64 tiles of codes ``[K, N]``; each group of eight codes is one int32, first code in the lowest nibble."""

WEIGHT: tuple[Step, ...] = (
    Rearrange(
        "tile",
        "e (nt j h c) (kt b t) -> e kt (nt c t j h b)",
        (("j", 4), ("h", 2), ("c", 8), ("b", 2), ("t", 4)),
    ),
    Pack(),
)
"""Codes ``[E, N, K/2]`` uint8 to ``[E, K/16, 2N]`` int32."""

SCALE: tuple[Step, ...] = (
    Rearrange(
        "permute scales",
        "e (nt jh x y i) g -> e g (nt i jh y x)",
        (("jh", 2), ("x", 2), ("y", 2), ("i", 8)),
    ),
    View(torch.uint8, torch.float8_e8m0fnu),
)
"""Scales ``[E, N, K/32]`` uint8 to ``[E, K/32, N]`` float8_e8m0fnu; vLLM 0.12 and later."""

BIAS: tuple[Step, ...] = (Rearrange("permute bias", "e (n j i p) -> e (n i j p)", (("j", 4), ("i", 4), ("p", 2))),)
"""Bias ``[E, N]``; its own inverse, keeps 8 of every 32 positions."""

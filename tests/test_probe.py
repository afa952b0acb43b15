import pytest
import torch

from gptoss_debug.engines.probe import probe_engine
from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts.catalog import BACKENDS
from gptoss_debug.layouts.chain import Chain
from gptoss_debug.layouts.probe import probe


def known(tensors):
    return {part: Chain(BACKENDS["marlin"].steps(part)).forward(tensor) for part, tensor in tensors.items()}


@pytest.mark.parametrize("backend", ["marlin", "raw"])
def test_the_installed_vllm_follows_the_patterns(backend):
    measured = probe_engine(backend)
    assert measured.agrees, str(measured)
    moved = {part.part: part.moved for part in measured.parts}
    assert (min(moved.values()) > 0) == (backend == "marlin")
    assert moved["w13_bias"] == (0 if backend == "raw" else 768 * 3 // 4)


def test_a_forgotten_bias_permutation_is_seen():
    def convert(tensors):
        return known(tensors) | {"w13_bias": tensors["w13_bias"]}

    measured = probe(convert, BACKENDS["marlin"], engine="an engine", kernels="real")
    assert [part.part for part in measured.parts if not part.agrees] == ["w13_bias"]
    assert "w13_bias: output element 2 is input element 2, the pattern says 8" in str(measured)
    assert not measured.to_json()["agrees"]


def test_swapped_tiles_are_seen():
    def convert(tensors):
        done = known(tensors)
        done["w2_weight"] = done["w2_weight"].flip(1)
        return done

    measured = probe(convert, BACKENDS["marlin"], engine="an engine", kernels="real")
    assert [part.part for part in measured.parts if not part.agrees] == ["w2_weight"]


def test_a_conversion_that_loses_elements_is_no_layout():
    def convert(tensors):
        return known(tensors) | {"w2_bias": torch.zeros_like(tensors["w2_bias"])}

    with pytest.raises(LayoutError, match="conversion of w2_bias is no re-ordering"):
        probe(convert, BACKENDS["marlin"], engine="an engine", kernels="real")

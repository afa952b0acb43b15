import functools
from dataclasses import dataclass

import torch
from torch import nn

from gptoss_debug.recording.census import CensusEntry, census


@dataclass
class Description:
    scale: torch.Tensor


class Kernel:
    def __init__(self):
        self.description = Description(torch.full((2,), 1.702))
        self.cache = {"limit": [torch.full((3,), 7.0)]}
        table = torch.ones(4)
        self.activation = lambda x: x * table
        self.partial = functools.partial(torch.add, torch.ones(5), alpha=2)
        self.loop = self

    def apply(self):
        return self.cache


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = torch.ones(6)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))
        self.register_buffer("table", torch.zeros(3))
        self.kernel = Kernel()
        self.bound = Kernel().apply
        self.slotted = Slotted()
        self.rows = self.weight.data[2:4]
        self.number, self.text, self.nothing = 3, "x", None


def test_every_hiding_place_is_found():
    model = nn.Sequential(Layer())
    found = {entry.path: entry for entry in census(model).entries}
    for path, size in {
        "0.weight": 32, "0.table": 3, "0.kernel.description.scale": 2, "0.kernel.cache['limit'][0]": 3,
        "0.kernel.activation.<table>": 4, "0.kernel.partial.args[0]": 5, "0.slotted.value": 6,
        "0.bound.__self__.description.scale": 2, "0.rows": 8,
    }.items():  # fmt: skip
        assert torch.Size(found[path].shape).numel() == size, path
    assert found["0.weight"].kind == "parameter"
    assert found["0.table"].kind == "buffer"
    assert found["0.kernel.description.scale"].kind == "unregistered"


def test_a_view_belongs_to_its_parameter():
    model = nn.Sequential(Layer())
    found = census(model)
    rows = next(entry for entry in found.entries if entry.path == "0.rows")
    assert (rows.owner, rows.offset, rows.shape) == ("0.weight", 8, (2, 4))
    assert "0.rows" not in {entry.path for entry in found.hidden}
    assert "0.kernel.description.scale" in {entry.path for entry in found.hidden}
    assert "1 parameters, 1 buffers" in str(found)


def test_entries_survive_json():
    for entry in census(nn.Sequential(Layer())).entries:
        assert CensusEntry.from_json(entry.to_json()) == entry

import functools

import pytest
import torch
from torch import nn

from gptoss_debug.recording.digests import digest
from gptoss_debug.recording.ledger import Ledger, LedgerKeeper, LedgerRow


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(4, 6, 8), requires_grad=False)
        self.sinks = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("table", torch.zeros(3))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "sinks":
                self.sinks.data.copy_(tensor[2:6])
            elif name == "experts":
                for expert in range(4):
                    weight_loader(self.experts, tensor[expert], shard_id="w1", expert_id=expert)
            elif name == "strided":
                self.experts.data[:, ::2].copy_(tensor)
            elif name == "computed":
                weight_loader(self.experts, (tensor + 1)[0], shard_id="w2", expert_id=0)
            elif name == "indexed":
                self.experts.data[[0, 2]] = tensor
            elif name == "masked":
                self.experts.data.masked_fill_(tensor > 0, 1.0)
            elif name == "foreach":
                torch._foreach_copy_([self.sinks.data], [tensor])
            elif name == "table":
                self.table.fill_(2)


def weight_loader(param, loaded_weight, shard_id, expert_id):
    param.data[expert_id, :, :5].copy_(loaded_weight)


def record(*weights):
    model = Model()
    keeper = LedgerKeeper(model, rank=1, load=2, loaders={weight_loader.__code__})
    with keeper:
        model.load_weights(keeper.loading(iter(weights)))
    return Ledger(tuple(keeper.rows), tuple(keeper.offered))


def test_a_loader_call_is_a_row():
    tensor = torch.randn(4, 6, 5)
    ledger = record(("experts", tensor))
    assert len(ledger.rows) == 4
    row = ledger.rows[2]
    assert (row.order, row.load, row.rank, row.call) == (3, 2, 1, 3)
    assert (row.source, row.parameter, row.shard, row.expert) == ("experts", "experts", "w1", "2")
    assert row.region == ((2, 3), (0, 6), (0, 5))
    assert row.source_region == ((2, 3), (0, 6), (0, 5))
    assert row.loader == row.writer == f"{__name__}.weight_loader"
    assert (row.shape, row.dtype, row.sha256) == ((6, 5), "float32", digest(tensor[2]))
    assert ledger.bypassed == ()


def test_a_bare_copy_is_seen_and_has_no_loader():
    ledger = record(("sinks", torch.randn(8)))
    (row,) = ledger.bypassed
    assert row.loader == ""
    assert row.writer == f"{__name__}.Model.load_weights"
    assert (row.region, row.source_region) == (((0, 4),), ((2, 6),))


def test_a_fill_of_a_buffer_is_seen():
    (row,) = record(("table", torch.zeros(1))).rows
    assert (row.parameter, row.operation) == ("table", "aten.fill_.Scalar")


def test_a_write_that_is_no_box_has_no_region():
    (row,) = record(("strided", torch.zeros(4, 3, 8))).rows
    assert row.region is None
    assert "?" in record(("strided", torch.zeros(4, 3, 8))).to_frame().region.tolist()


@pytest.mark.parametrize("name", ["indexed", "masked"])
def test_a_write_that_may_miss_elements_has_no_region(name):
    (row,) = record((name, torch.zeros(2, 6, 8) if name == "indexed" else torch.zeros(4, 6, 8))).rows
    assert (row.parameter, row.region) == ("experts", None)


def test_a_write_to_a_list_of_tensors_is_seen():
    (row,) = record(("foreach", torch.zeros(4))).rows
    assert (row.parameter, row.loader) == ("sinks", "")


def test_computed_values_have_no_source_region():
    (row,) = record(("computed", torch.zeros(1, 6, 5))).rows
    assert row.source_region is None
    assert row.region is not None


def test_a_tensor_that_nobody_wants_is_unused():
    ledger = record(("experts", torch.zeros(4, 6, 5)), ("renamed.experts", torch.zeros(4, 6, 5)))
    assert ledger.unused == ("renamed.experts",)
    assert "1 checkpoint tensors unused" in str(ledger)


def test_rows_survive_json():
    ledger = record(("experts", torch.zeros(4, 6, 5)), ("strided", torch.zeros(4, 3, 8)), ("sinks", torch.zeros(8)))
    assert tuple(LedgerRow.from_json(row.to_json()) for row in ledger.rows) == ledger.rows


def test_nothing_is_recorded_after_the_block():
    model = Model()
    keeper = LedgerKeeper(model, 0, 1, set())
    with pytest.raises(RuntimeError, match="stop"), keeper:
        raise RuntimeError("stop")
    model.load_weights([("sinks", torch.zeros(8))])
    assert keeper.rows == []


def test_loaders_are_found_behind_partials_and_methods():
    from gptoss_debug.engines.vllm_adapter import loader_code

    model = Model()
    model.experts.weight_loader = functools.partial(functools.partial(weight_loader, shard_id="w1"), expert_id=0)
    model.sinks.weight_loader = model.load_weights
    codes = loader_code(model)
    assert {weight_loader.__code__, Model.load_weights.__code__} <= codes

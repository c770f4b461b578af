"""A tensor that other workers hold tells its form, and refuses every use of its values, by whoever kept it."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from paceline.errors import InputError
from paceline.strategies.guards.absent import drop, form_of, hide, is_absent, present, show

CPU = torch.device("cpu")


def dropped() -> tuple[nn.Sequential, list[nn.Parameter], AveragedModel]:
    """Return a model whose first layer alone is here, its parameters as they were taken before, and an average."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4))
    kept, average = list(model.parameters()), AveragedModel(model)
    drop(model, frozenset({"0.weight", "0.bias"}), CPU)
    return model, kept, average


USES = {
    "call": lambda model, kept, average: model(torch.randn(2, 3)),
    "layer": lambda model, kept, average: model[2](torch.randn(2, 4)),
    "deepcopy": lambda model, kept, average: copy.deepcopy(model),
    "save": lambda model, kept, average: torch.save(model, io.BytesIO()),
    "save state": lambda model, kept, average: torch.save(model.state_dict(), io.BytesIO()),
    "clone state": lambda model, kept, average: {k: v.clone() for k, v in model.state_dict().items()},
    "average": lambda model, kept, average: average.update_parameters(model),
    "average by hand": lambda model, kept, average: [
        mean.detach().mul_(0.9).add_(one.detach(), alpha=0.1)
        for mean, one in zip(average.module.parameters(), model.parameters(), strict=True)
    ],
    "norm": lambda model, kept, average: sum(one.norm() for one in model.parameters()),
    "norms": lambda model, kept, average: torch._foreach_norm(list(model.parameters())),
    "vector": lambda model, kept, average: nn.utils.parameters_to_vector(model.parameters()),
    "kept": lambda model, kept, average: sum(one.sum() for one in kept),
    "gradients": lambda model, kept, average: nn.utils.clip_grad_norm_(kept, 1.0),
    "data": lambda model, kept, average: model[1].weight.data.sum(),
    "number": lambda model, kept, average: model[1].weight[0].item(),
    "numpy": lambda model, kept, average: model[1].weight.detach().numpy(),
    "pointer": lambda model, kept, average: model[1].weight.data_ptr(),
    "buffer": lambda model, kept, average: float(model[1].running_mean.sum()),
    "text": lambda model, kept, average: f"{model[1].weight}",
    "draw": lambda model, kept, average: nn.init.normal_(model[1].weight),
    "make anew": lambda model, kept, average: model[2].reset_parameters(),
    "assign": lambda model, kept, average: setattr(kept[2], "data", torch.ones(4)),
    "type": lambda model, kept, average: model.double(),
    "comparison": lambda model, kept, average: torch.equal(kept[2], kept[2]),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_of_values_is_refused_in_one_line(use):
    with pytest.raises(InputError, match="not on this worker") as caught:
        USES[use](*dropped())
    assert "\n" not in str(caught.value)


def test_what_it_is_can_be_read():
    whole, (model, kept, _) = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4)), dropped()
    assert [(n, p.shape, p.dtype) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in whole.named_parameters()
    ]
    assert sum(one.numel() for one in model.parameters()) == sum(one.numel() for one in whole.parameters())
    assert {one.device for one in model.parameters()} == {CPU}
    assert list(model.state_dict()) == list(whole.state_dict())
    assert [name for name, _ in present(model.named_parameters())] == ["0.weight", "0.bias"]
    assert torch.isfinite(kept[0].sum())
    assert str(model) == str(whole)
    assert isinstance(kept[2], nn.Parameter)
    assert {kept[2]: 1}[kept[2]]
    assert form_of(kept[2]).shape == (4,)
    assert form_of(kept[2]).is_meta


def test_writes_that_its_worker_does_are_left_to_it():
    model, kept, _ = dropped()
    whole = {name: torch.ones(value.shape, dtype=value.dtype) for name, value in model.state_dict().items()}
    model.load_state_dict(whole)
    assert torch.equal(kept[0], torch.ones(4, 3))
    with torch.no_grad():
        for one in kept:
            one.data.clamp_(-0.5, 0.5)
            one.data *= 0.5
            one.mul_(2.0)
    model.zero_grad()
    assert torch.equal(kept[0], torch.full((4, 3), 0.5))
    model.requires_grad_(requires_grad=False)
    assert not any(one.requires_grad for one in kept)


def test_rows_take_no_writes_and_come_back():
    class Own(nn.Parameter):
        pass

    one = Own(torch.ones(2))
    hide(one, "one", is_elsewhere=False)
    for write in (one.zero_, one.detach, lambda: one.data, lambda: one.copy_(torch.zeros(2))):
        with torch.no_grad(), pytest.raises(InputError):
            write()
    show(one)
    show(one)
    assert type(one) is Own
    assert not is_absent(one)
    assert torch.equal(one, torch.ones(2))
    assert not vars(one)

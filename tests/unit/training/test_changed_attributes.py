"""What a run has changed beside tensors is as it was where the run goes back to."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import InputError
from paceline.training import attribute_values
from paceline.training.attribute_changes import Then
from paceline.training.changed_attributes import ChangedAttributes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.lazy = nn.Dropout(0.1), nn.LazyLinear(2)
        self.table = {"a": [1]}
        self.also = self.table
        self.act: Any = torch.tanh
        self.seen: Any = None

    @staticmethod
    def fixed(value: Any) -> Any:
        """Do what a class keeps by a name."""
        return value


def begun() -> tuple[Net, ChangedAttributes]:
    net, changed = Net(), ChangedAttributes()
    changed.begin(net, None)
    return net, changed


def change(net: Net) -> None:
    net.drop.p, net.new, net.act = 0.5, 1, torch.relu  # type: ignore[assignment]
    net.table["a"] = [2]
    net.eval()


def test_values_tables_and_functions_are_set_back() -> None:
    net, changed = begun()
    net.drop.p, net.seen = 0.2, torch.ones(1)
    then = changed.now(net, None)
    change(net)
    net.lazy(torch.ones(1, 3))
    changed.set_back(net, None, then, 4)
    assert (net.drop.p, net.act, net.also, net.training) == (0.2, torch.tanh, {"a": [1]}, True)
    assert net.also is net.table
    assert not hasattr(net, "new")
    assert net.seen is not None
    assert net.lazy.in_features == 3
    assert changed.now(net, None).changes[("drop", "p")] == (0.1, 0.2)
    changed.set_back(net, None, Then({}), 0)
    assert net.drop.p == 0.1


def test_what_came_back_meanwhile_is_set_again() -> None:
    net, changed = begun()
    change(net)
    then = changed.now(net, None)
    net.drop.p, net.act = 0.1, torch.tanh
    del net.new
    changed.set_back(net, None, then, 4)
    assert (net.drop.p, net.act, net.new) == (0.5, torch.relu, 1)


def test_what_cannot_be_set_back_is_refused() -> None:
    net, changed = begun()
    factor = (
        2  # a lambda without a value of its own travels where the main module has no file, as under xdist
    )
    net.act = lambda value: value * factor
    then = changed.now(net, None)
    net.act = torch.relu
    with pytest.raises(
        InputError,
        match=r"^act of the model was set in the run to .*relu, .* back to step 4, where it was .*lambda",
    ):
        changed.set_back(net, None, then, 4)
    net, changed = begun()
    net.more = nn.Linear(1, 1)
    with pytest.raises(
        InputError, match=r"^more was replaced in the run and is a Linear by now, .* it was no module"
    ):
        changed.set_back(net, None, Then({}), 0)


def test_only_checkpoints_that_are_there_are_remembered_and_share_what_they_have_alike() -> None:
    net, changed = begun()
    net.config = object()
    changed = ChangedAttributes()
    changed.begin(net, None)
    for number in range(10):
        net.drop.p = number / 10
        changed.note_saved(number, net, None, [0, number - 1, number])
    kept = [changed.saved_at(number) for number in range(10)]
    known = [then for then in kept if then is not None]
    assert [number for number, then in enumerate(kept) if then is not None] == [0, 8, 9]
    assert known[-1].changes[("drop", "p")] == (0.1, 0.9)
    assert len({id(then.others) for then in known}) == 1


def test_a_look_packs_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    net, changed = begun()
    net.act = torch.relu
    packed: list[Any] = []
    pack = attribute_values.pack
    monkeypatch.setattr(attribute_values, "pack", lambda value: packed.append(value) or pack(value))
    then = changed.now(net, None)
    assert not packed
    there = pickle.loads(pickle.dumps(then))  # noqa: S301
    assert packed
    net.act = torch.tanh
    changed.set_back(net, None, there, 4)
    assert net.act is torch.relu


@pytest.mark.parametrize("home", ["numpy.linalg", __name__])
def test_what_a_library_puts_there_in_a_pass_is_its_own(home: str) -> None:
    def made(*_: Any) -> None:
        """Stand for what transformers registers in its first pass."""

    net, changed = begun()
    made.__module__ = home
    net.drop.register_forward_hook(made)
    net.act = made
    found = {name for _, name in changed.changes(net, None)}
    assert ("its hooks" in found, "act" in found) == (home == __name__,) * 2

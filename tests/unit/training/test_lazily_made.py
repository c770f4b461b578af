"""What a first step makes is made again by every start, with the flags and sizes beside it; what goes on changing is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.task import Task
from paceline.training.changed_attributes import ChangedAttributes
from paceline.world import alone
from tests.unit.training.test_changed_attributes import Net
from tests.unit.training.test_saved_attributes import saved

Pass = Callable[[Any, Net, int], None]


def halve(*given: Any) -> Any:
    return given[-1] * 0.5


def ready(task: Any, net: Net, number: int) -> None:
    """Make a loss beside a flag."""
    if not task.ready:
        task.loss_fn, task.ready = nn.MSELoss(), True
    task.loss_fn(torch.ones(1), torch.ones(1))


def hooked(task: Any, net: Net, number: int) -> None:
    """Register a hook of a module beside a flag of the task."""
    if not task.ready:
        net.drop.register_forward_hook(halve)
        task.ready = True


def sized(task: Any, net: Any, number: int) -> None:
    """Make a mask anew where batches have another size: step 1, 3 and 6."""
    size = 2000 + number // 3
    if net.size != size:
        net.mask, net.size = torch.ones(size), size
    assert len(net.mask) == size


def start() -> tuple[Any, Any]:
    task: Any = Task()
    task.ready, task.rate, task.count = False, 1.0, 0
    net: Any = Net()
    net.size, net.mask, net.last = 0, None, None
    return task, net


def train(
    passes: Pass, first: int, last: int, then: Any = None
) -> tuple[Any, Any, ChangedAttributes, list[str]]:
    """Take steps as a run does; a hook anneals a rate and counts, and forward keeps its batch."""
    task, net = start()
    changed, texts = ChangedAttributes(), list[str]()
    changed.begin(net, task)
    if then is not None:
        texts += changed.go_on(alone(), net, task, then, first, computes=True)
    for number in range(first, last):
        passes(task, net, number)
        net.last = torch.ones(5000)
        changed.after_passes(net, task)
        task.rate *= 0.9
        task.count += 1
        texts += changed.after_step(net, task)
    return task, net, changed, texts


@pytest.mark.parametrize("passes", [ready, hooked, sized])
@pytest.mark.parametrize("left", [2, 6, 13])
def test_a_start_makes_again_what_its_first_step_makes_and_has_what_went_on_changing(
    passes: Pass, left: int
) -> None:
    task, net, changed, texts = train(passes, 1, left)
    then = saved(changed, net, task)
    task, net, changed, told = train(passes, left, left + 3, then)
    assert not texts
    assert not told
    assert len(changed.changes(net, task)) == len(train(passes, 1, left + 3)[2].changes(net, task))
    assert task.rate == pytest.approx(0.9 ** (left + 2))
    assert task.count == left + 2
    train(passes, left + 3, left + 5, saved(changed, net, task))


def test_what_a_first_step_measured_beside_an_object_and_measures_otherwise_now_is_told() -> None:
    def measured(task: Any, net: Net, number: int) -> None:
        if not task.ready:
            task.loss_fn, task.ready, task.scale = nn.MSELoss(), True, number / 10

    task, net, changed, _ = train(measured, 1, 6)
    _, _, _, texts = train(measured, 6, 8, saved(changed, net, task))
    (text,) = texts
    assert text.startswith(
        "scale of the task (along with ready) was set in the run to what no checkpoint holds (0.1)"
    )


def test_what_is_measured_once_beside_a_batch_that_is_kept_is_put_back() -> None:
    def measured(task: Any, net: Any, number: int) -> None:
        if not hasattr(net, "scale"):
            net.scale = number / 10

    task, net, changed, _ = train(measured, 1, 6)
    _, net, _, texts = train(measured, 6, 8, saved(changed, net, task))
    assert net.scale == 0.1
    assert not texts


def test_what_was_deleted_or_is_no_object_any_more_is_so_again() -> None:
    def change(task: Any, net: Any, number: int) -> None:
        if number == 3:
            del task.ready
            net.config = None

    def begin() -> tuple[Any, Any, ChangedAttributes]:
        task, net = start()
        net.config = object()
        changed = ChangedAttributes()
        changed.begin(net, task)
        return task, net, changed

    task, net, changed = begin()
    change(task, net, 3)
    then = saved(changed, net, task)
    task, net, changed = begin()
    assert not changed.go_on(alone(), net, task, then, 3, computes=True)
    assert not hasattr(task, "ready")
    assert net.config is None
    assert saved(changed, net, task).changes.keys() == then.changes.keys()

"""A model, task or loop that keeps something beside parameters and buffers, and computes with it."""

from __future__ import annotations

import random
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline.errors import InputError
from paceline.strategies.guards.reached import reached_from
from paceline.task import Loss, Task
from paceline.training.checks.hidden_state import HiddenState

A_GLOBAL = np.random.default_rng(0)
Forward = Callable[[Any, Tensor], Tensor]


class Hidden(nn.Module):
    """Does what it is told, with things of every kind at hand."""

    of_class = random.Random(0)

    def __init__(self, work: Forward) -> None:
        super().__init__()
        self.work = work
        self.calls = 0
        self.torch_one = torch.Generator()
        self.listed = [torch.Generator()]
        self.config = SimpleNamespace(noise={"rng": np.random.default_rng(0)})
        self.state = np.random.RandomState(0)
        self.plain = random.Random(0)
        self.total = torch.zeros(3)
        self.h: Tensor | None = torch.zeros(3)
        self.pair = (torch.zeros(3), torch.zeros(3))
        self.bank = deque([torch.zeros(3)] * 2, maxlen=2)
        self.grown = [torch.zeros(3)]
        self.by_key: dict[int, Tensor] = {}
        self.mask = torch.ones(0)
        self.count = np.zeros(2)
        self.shown: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.work(self, inputs)


class Watched:
    """Takes steps of two passes each."""

    def __init__(
        self, work: Forward, *, task: Task | None = None, several: bool = True, sharded: bool = False
    ) -> None:
        self.model, self.watch = nn.Sequential(nn.Linear(3, 3), Hidden(work)), HiddenState()
        self.task, self.several, self.sharded, self.number = task, several, sharded, 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss.mean(model(batch).sum(1))

    def step(self) -> list[str]:
        self.watch.enter(self.model, self.task, sharded=self.sharded)
        with self.watch.passes():
            loss = self.watch.around(self.task.loss if self.task is not None else self.loss)
            for rows in (2, 2 + self.number % 2):
                loss(self.model, torch.ones(rows, 3)).total.backward()
            self.optimizer.step()
        self.number += 1
        return self.watch.check(self.number - 1, several=self.several)

    def steps(self, count: int = 4) -> list[str]:
        return [text for _ in range(count) for text in self.step()]


def carry(module: Any, inputs: Tensor) -> Tensor:
    outputs = inputs + 0.5 * module.h
    module.h = outputs.detach().mean(0)
    return outputs


def carry_pair(module: Any, inputs: Tensor) -> Tensor:
    outputs = inputs + module.pair[1]
    module.pair = tuple(one.detach() for one in (inputs.mean(0), outputs.mean(0)))
    return outputs


def carry_in_bank(module: Any, inputs: Tensor) -> Tensor:
    outputs = inputs - torch.stack(list(module.bank)).mean(0)
    module.bank.append(inputs.detach().mean(0))
    return outputs


def count_passes(module: Any, inputs: Tensor) -> Tensor:
    module.h = module.h + 1
    return inputs * module.h


def grow_list(module: Any, inputs: Tensor) -> Tensor:
    outputs = inputs - torch.stack(module.grown[-3:]).mean(0)
    module.grown.append(inputs.detach().mean(0))
    return outputs


def grow_dict(module: Any, inputs: Tensor) -> Tensor:
    outputs = inputs - sum(module.by_key.values())
    module.by_key[len(module.by_key)] = inputs.detach().mean(0)
    return outputs


def count_in_place(module: Any, inputs: Tensor) -> Tensor:
    module.total += 1
    return inputs * module.total


def draw_in_optimizer(module: Any, inputs: Tensor) -> Tensor:
    return inputs * (1 + module.calls * 0)


def leave_for_loss(module: Any, inputs: Tensor) -> Tensor:
    module.shown = inputs * 2
    return inputs + module.shown


def log(module: Any, inputs: Tensor) -> Tensor:
    module.h = module.h + inputs.detach().mean(0)
    return inputs


def grow_mask(module: Any, inputs: Tensor) -> Tensor:
    if len(module.mask) < module.calls:
        module.mask = torch.arange(module.calls, dtype=torch.float)
    return inputs * module.mask[: 1 + module.calls // 2].sum()


def cast_mask(module: Any, inputs: Tensor) -> Tensor:
    outputs = inputs * module.mask.sum()
    module.mask = torch.arange(3).type_as(inputs)
    return outputs


def cache_by_length(module: Any, inputs: Tensor) -> Tensor:
    length = len(inputs)
    if length not in module.by_key:
        module.by_key[length] = torch.arange(length).to(inputs)
    return inputs * sum(one.sum() for one in module.by_key.values())


def scratch(module: Any, inputs: Tensor) -> Tensor:
    module.shown = torch.zeros_like(inputs)
    module.h.copy_(inputs.detach().mean(0))
    return inputs * module.h


def draw_and_seed(module: Any, inputs: Tensor) -> Tensor:
    module.torch_one.manual_seed(module.calls)
    return inputs * torch.rand(1, generator=module.torch_one)


def globals_of_the_process(module: Any, inputs: Tensor) -> Tensor:
    random.random()
    np.random.rand()
    return inputs * torch.rand(1)


DRAWS: dict[str, tuple[Forward, str]] = {
    "torch": (lambda m, x: x * torch.rand(1, generator=m.torch_one), r"1\.torch_one, a torch\.Generator"),
    "list": (lambda m, x: x * torch.rand(1, generator=m.listed[0]), r"1\.listed\[0\]"),
    "config": (
        lambda m, x: x * float(m.config.noise["rng"].random()),
        r"1\.config\.noise\['rng'\], a numpy Gen",
    ),
    "numpy state": (lambda m, x: x * float(m.state.rand()), r"1\.state, a numpy RandomState"),
    "random": (lambda m, x: x * m.plain.random(), r"1\.plain, a random Random"),
    "class": (lambda m, x: x * m.of_class.random(), r"1\.of_class"),
    "global": (lambda m, x: x * float(A_GLOBAL.random()), "A_GLOBAL"),
}
CARRIES: dict[str, tuple[Forward, str]] = {
    "attribute": (carry, r"1\.h"),
    "pair": (carry_pair, r"1\.pair\[1\]"),
    "bank": (carry_in_bank, r"1\.bank\[0\]"),
    "list": (grow_list, r"1\.grown\[1\]"),
    "dict": (grow_dict, r"1\.by_key\[0\]"),
    "counter": (count_passes, r"1\.h"),
    "in place": (count_in_place, r"1\.total"),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_generator_of_ones_own_is_refused_on_several_workers_and_told_of_on_one(kind: str) -> None:
    work, name = DRAWS[kind]
    with pytest.raises(InputError, match=f"step 0: the passes draw from {name}"):
        Watched(work).steps()
    notes = Watched(work, several=False).steps()
    assert len(notes) == 1
    assert re.search(name, notes[0])


def test_a_generator_that_a_hook_closes_over_is_found() -> None:
    mine = np.random.default_rng(0)
    run = Watched(draw_in_optimizer)
    run.model[0].register_forward_hook(lambda module, args, output: output * float(mine.random()))
    with pytest.raises(InputError, match="draw from mine, a numpy Generator"):
        run.steps()


class Drawing(Task):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.kept: Tensor | None = None
        self.log = torch.zeros(())
        self.draws = self.keeps = False

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        losses = model(batch).sum(1)
        if self.draws:
            losses = losses * float(self.rng.random())
        if self.keeps:
            losses = losses + (0.0 if self.kept is None else self.kept.sum())
            self.kept = batch.mean(0)
        self.log = self.log + losses.mean()
        return Loss.mean(losses)


def test_the_tasks_own_are_seen_too_and_a_log_is_not() -> None:
    task = Drawing()
    run = Watched(draw_in_optimizer, task=task)
    assert run.steps() == []
    task.draws = True
    with pytest.raises(InputError, match=r"draw from task\.rng"):
        run.step()
    task.draws, task.keeps = False, True
    with pytest.raises(InputError, match=r"carry task\.kept from one to the next"):
        run.steps(6)


def test_what_optimizer_and_loop_draw_between_the_passes_is_theirs() -> None:
    run = Watched(draw_in_optimizer)
    module: Any = run.model[1]
    run.optimizer.register_step_pre_hook(lambda *_: module.plain.seed(module.plain.random()))
    for _ in range(4):
        assert run.step() == []
        module.state.rand()
        module.h = torch.rand(3)


@pytest.mark.parametrize("kind", CARRIES)
def test_a_tensor_carried_from_pass_to_pass_is_refused_on_several_workers_and_told_of_on_one(
    kind: str,
) -> None:
    work, name = CARRIES[kind]
    with pytest.raises(InputError, match=f"step 1: the passes carry {name} from one to the next"):
        Watched(work).steps()
    notes = Watched(work, several=False).steps()
    assert len(notes) == 1
    assert re.search(name, notes[0])


@pytest.mark.parametrize(
    "work",
    [
        leave_for_loss,
        log,
        grow_mask,
        cast_mask,
        cache_by_length,
        draw_and_seed,
        globals_of_the_process,
        draw_in_optimizer,
    ],
)
def test_what_does_no_harm_is_left_alone(work: Forward) -> None:
    assert Watched(work).steps(9) == []


def test_what_cannot_be_told_from_a_draw_is_a_note() -> None:
    def seed(module: Any, inputs: Tensor) -> Tensor:
        module.plain.seed(module.calls)
        return inputs * module.plain.random()

    assert [re.findall(r"draw from (\S+),", text) for text in Watched(seed).steps()] == [["1.plain"]]
    notes = Watched(scratch).steps()
    assert [re.findall(r"writes to (\S+),", text) for text in notes] == [["1.h"]]


def test_what_forward_writes_to_is_told_of() -> None:
    def write(module: Any, inputs: Tensor) -> Tensor:
        module.total += inputs.detach().mean(0)
        module.count[0] += 1
        return inputs

    [note] = Watched(write).steps()
    assert re.search(r"step 1: forward writes to 1\.total,.* The same goes for 1\.count\.$", note)


def test_a_loops_own_variables_are_looked_at() -> None:
    model, watch = nn.Linear(3, 3), HiddenState()
    running, h, rng = torch.zeros(()), torch.zeros(3), np.random.default_rng(0)

    def steps(*, carries: bool, draws: bool) -> None:
        nonlocal running, h
        for number in range(4):
            watch.enter(model)
            with watch.passes(sys._getframe()):
                for _ in range(2):
                    batch = torch.ones(2, 3)
                    watch.show_batch(batch)
                    losses = model(batch) + (h if carries else 0)
                    h = losses.detach().mean(0)
                    loss = Loss.mean(losses.sum(1) * (float(rng.random()) if draws else 1))
                    running = running + loss.total
                    watch.show_loss(loss)
            rng.random()
            assert watch.check(number, several=True) == []

    steps(carries=False, draws=False)
    with pytest.raises(InputError, match="draw from the loop's rng"):
        steps(carries=False, draws=True)
    watch = HiddenState()
    with pytest.raises(InputError, match="carry the loop's h from"):
        steps(carries=True, draws=False)


class Numbers(Dataset[int]):
    def __init__(self) -> None:
        self.rng = random.Random(0)


def test_a_large_task_costs_little_and_data_sets_are_left_alone() -> None:
    task = Drawing()
    task.words = {f"word {index}": index for index in range(200_000)}  # type: ignore[attr-defined]
    task.samples = [(torch.zeros(1), index) for index in range(20_000)]  # type: ignore[attr-defined]
    task.sets = [Numbers(), TensorDataset(torch.zeros(9))]  # type: ignore[attr-defined]
    started = time.process_time()
    found = reached_from(nn.Linear(2, 2), [("task", task)])
    assert time.process_time() - started < 1
    assert set(found.generators) == {"task.rng"}
    assert len(found.tensors) < 300


def test_nothing_is_kept_alive() -> None:
    run = Watched(leave_for_loss)
    run.steps(3)
    module: Any = run.model[1]
    left = weakref.ref(module.shown)
    module.shown = None
    assert left() is None


class Taught(Task):
    """Learns from another model, which a loss may leave in training mode."""

    def __init__(self) -> None:
        self.teacher = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        with torch.no_grad():
            wanted = self.teacher(batch)
        return Loss.mean((model(batch) - wanted).square().sum(1))


def test_statistics_of_a_model_beside_the_one_that_is_trained_are_told_of() -> None:
    task = Taught()
    [note] = Watched(lambda _, inputs: inputs, task=task).steps()
    assert "forward writes to task.teacher.1." in note
    task.teacher.eval()
    assert Watched(lambda _, inputs: inputs, task=task).steps() == []

"""An iterator that a loop takes from with each batch gives a worker what no other number of workers gets: it is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import InputError

SAID = "with each batch, inside `for batch in step`"
Take = Callable[[nn.Module, Tensor, Tensor], Tensor]


def rows(seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(seed)))


def unlabelled() -> DataLoader[Any]:
    return DataLoader(rows(1), batch_size=2, shuffle=True)


def losses(model: nn.Module, x: Tensor, u: Tensor | float) -> Tensor:
    extra = model(u).square().mean() if isinstance(u, Tensor) and u.dim() > 1 else torch.as_tensor(u)
    found: Tensor = model(x).square().flatten() * (1 + extra)
    return found


class Loop:
    """The objects of one loop."""

    def __init__(self, run: paceline.Run) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        self.steps = run.steps(rows(0), batch_size=8, epochs=2)


def each(loop: Loop, steps: Iterable[Any], taken: Callable[[], Any]) -> None:
    """Take with each batch."""
    for step in steps:
        for (x,) in step:
            step.backward(losses(loop.model, x, taken()))
        step.apply()


# What is refused.


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def growing() -> Iterator[float]:
    weight = 0.0
    while True:
        yield weight
        weight += 0.1


class Endless:
    """Begins again at its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self.iterator = loader, iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)


class Counting:
    """Goes through a table by a number."""

    def __init__(self) -> None:
        self.place, self.table = 0, torch.linspace(0, 1, 100)

    def __next__(self) -> Tensor:
        self.place += 1
        return self.table[self.place]


def iterator_of_a_loader(loop: Loop) -> None:
    others = iter(unlabelled())
    for step in loop.steps:
        for (x,) in step:
            try:
                (u,) = next(others)
            except StopIteration:
                others = iter(unlabelled())
                (u,) = next(others)
            step.backward(losses(loop.model, x, u))
        step.apply()


def iterator_of_a_step(loop: Loop) -> None:
    for step in loop.steps:
        others = iter(unlabelled())
        for (x,) in step:
            step.backward(losses(loop.model, x, next(others)[0]))
        step.apply()


def zipped_with_a_loader(loop: Loop) -> None:
    for step in loop.steps:
        for (x,), (u,) in zip(step, unlabelled(), strict=False):
            step.backward(losses(loop.model, x, u))
        step.apply()


def cycled(loop: Loop) -> None:
    others = itertools.cycle(unlabelled())
    each(loop, loop.steps, lambda: next(others)[0])


def generator_over_a_loader(loop: Loop) -> None:
    others = endless(unlabelled())
    each(loop, loop.steps, lambda: next(others)[0])


def class_around_a_loader(loop: Loop) -> None:
    others = Endless(unlabelled())
    each(loop, loop.steps, lambda: next(others)[0])


def counted_table(loop: Loop) -> None:
    table = Counting()
    each(loop, loop.steps, lambda: next(table))


def generator_of_numbers(loop: Loop) -> None:
    weights = growing()
    each(loop, loop.steps, lambda: next(weights))


def generator_over_a_list(loop: Loop) -> None:
    weights = (number / 10 for number in [*range(100)])
    for step in loop.steps:
        for (x,) in step:
            step.backward(losses(loop.model, x, next(weights)))
        step.apply()


def list_in_a_zip(loop: Loop) -> None:
    weights = iter([number / 10 for number in range(100)])
    for step in loop.steps:
        for (x,), weight in zip(step, weights, strict=False):
            step.backward(losses(loop.model, x, weight))
        step.apply()


# What is not.


def progress(steps: Iterable[Any]) -> Iterator[Any]:
    shown = 0.0
    for one in steps:
        shown = 0.9 * shown + 0.1
        yield one


class Bar:
    """Counts what goes through it."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source, self.count = iter(source), 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.count += 1
        return next(self.source)


def once_a_step(loop: Loop) -> None:
    others, weights = iter(unlabelled()), growing()
    for step in loop.steps:
        (u,) = next(others)
        weight = next(weights)
        for (x,) in step:
            step.backward(losses(loop.model, x, u) * (1 + weight))
        step.apply()


def wrapped(loop: Loop) -> None:
    ticks = itertools.count()
    seen = enumerate(progress(loop.steps))
    for _, step in seen:
        batches = Bar(progress(step))
        numbered = zip(batches, itertools.count(), strict=False)
        for place, ((x,), _) in enumerate(numbered):
            next(ticks)
            step.backward(losses(loop.model, x, 0.0 * place))
        step.apply()


def anew_in_each_batch(loop: Loop) -> None:
    loader = unlabelled()
    each(loop, loop.steps, lambda: next(iter(loader))[0])


def whole_in_each_batch(loop: Loop) -> None:
    loader = DataLoader(rows(1), batch_size=12)
    each(loop, loop.steps, lambda: torch.stack([x.mean() for (x,) in loader]).mean())


def noise() -> Iterator[Tensor]:
    while True:
        drawn = torch.rand(())
        again = float(drawn)
        yield drawn * again


def generator_of_noise(loop: Loop) -> None:
    drawn = noise()
    each(loop, loop.steps, lambda: next(drawn))


def running_mean() -> Generator[float, float, None]:
    mean = 0.0
    while True:
        sent = yield mean
        mean = 0.9 * mean + 0.1 * sent


def logged_in_each_batch(loop: Loop) -> None:
    mean = running_mean()
    next(mean)
    each(loop, loop.steps, lambda: 0.0 * mean.send(2.0))


REFUSED = (
    iterator_of_a_loader,
    iterator_of_a_step,
    zipped_with_a_loader,
    cycled,
    generator_over_a_loader,
    class_around_a_loader,
    counted_table,
    generator_of_numbers,
    generator_over_a_list,
    list_in_a_zip,
)
ALLOWED = (
    once_a_step,
    wrapped,
    anew_in_each_batch,
    whole_in_each_batch,
    generator_of_noise,
    logged_in_each_batch,
)


def habits(run: paceline.Run) -> dict[str, str]:
    """Train once for each habit, and return what was said, or the weights."""
    made: dict[str, str] = {}
    for habit in (*REFUSED, *ALLOWED):
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            habit(Loop(own))
            made[habit.__name__] = own.weights_sha256()
        except InputError as error:
            made[habit.__name__] = str(error)
        run.world.comm.barrier()
        own._engine.state.replica.abandon()
    return made


def found_with(shards: int, workers: int, **options: Any) -> list[dict[str, str]]:
    found: list[dict[str, str]] = paceline.launch(
        habits, workers=workers, shards=shards, threads=1, **options
    )
    for one in found:
        for habit in REFUSED:
            assert SAID in one[habit.__name__], habit.__name__
        for habit in ALLOWED:
            assert SAID not in one[habit.__name__], habit.__name__
    return found


@pytest.mark.parametrize(("workers", "shards"), [(2, 4), (2, 2)])
def test_what_is_taken_with_each_batch_is_refused_and_all_else_computes_the_same(
    workers: int, shards: int
) -> None:
    alone = found_with(shards, 1)[0]
    for found in found_with(shards, workers, strategy="ddp"):
        for habit in ALLOWED:
            assert found[habit.__name__] == alone[habit.__name__], habit.__name__


def test_one_shard_has_all_batches() -> None:
    found: dict[str, str] = paceline.launch(habits, workers=1, shards=1, threads=1)[0]
    assert not any(SAID in text for text in found.values())


def test_it_is_said_where_the_iterator_lies() -> None:
    found = found_with(2, 1)[0]
    assert "takes from the loop's others, an iterator of its own, with" in found["iterator_of_a_loader"]
    assert "takes from the loop's weights, an iterator of its own, with" in found["generator_over_a_list"]
    assert "takes from an iterator of a DataLoader with" in found["zipped_with_a_loader"]

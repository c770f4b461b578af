"""A stream that gives other items where an epoch is read again is refused: a resumed run would repeat samples and lose others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline import Run
from paceline.checkpoint.manifest import EXTRA_STATE
from paceline.data import ShardedLoader
from paceline.errors import InputError
from paceline.observe import Note
from paceline.recovery.position import Position
from paceline.training.checks.epoch_starts import EpochStarts
from tests.unit.training.own_runs import losses, opened, prepared, resumed


def item(number: int) -> tuple[Tensor, Tensor]:
    features = torch.randn(4, generator=torch.Generator().manual_seed(number))
    return features, features.sum().unsqueeze(0)


class Shuffled:
    """30 items in another order each epoch, by a generator that lives as long as the stream."""

    def __init__(self) -> None:
        self.generator = random.Random(3)

    def order(self) -> list[int]:
        return self.generator.sample(range(30), 30)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(item, self.order())


class Anew(Shuffled):
    """By one that is made in __iter__, from the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.generator = random.Random(epoch)


class Global(Shuffled):
    """By the process's own, which paceline seeds."""

    def order(self) -> list[int]:
        return random.sample(range(30), 30)


class GoesOn(Shuffled):
    """Items that go on where the epoch before has ended."""

    position = 0

    def order(self) -> list[int]:
        self.position += 30
        return list(range(self.position - 30, self.position))


class Seeks(Shuffled):
    """By its own, from any item on."""

    first = 0

    def seek(self, position: int) -> None:
        self.first = position

    def order(self) -> list[int]:
        return super().order()[self.first :]


def train(run: Run, stream: Any, steps: int, **options: Any) -> Tensor:
    model, _ = prepared(run)
    for step in run.steps(stream, batch_size=8, steps=steps, **options):
        for batch in step:
            step.backward(losses(model, batch))
        step.apply()
    run._engine.calls.finish()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


OTHERS = (
    r"the training stream gives other items in epoch 1 than when that epoch was read before \(item\[0\]: .*\), so samples would "
    r"be repeated and others lost\. .*set_epoch"
)


@pytest.mark.parametrize("kind", [Shuffled, GoesOn])
def test_a_stream_that_keeps_its_place_from_epoch_to_epoch_is_not_resumed_within_one(
    kind: type[Shuffled], tmp_path: Path
) -> None:
    with opened(out=tmp_path) as run:
        train(run, kind(), 6)
    with resumed(tmp_path) as run, pytest.raises(InputError, match=OTHERS):
        train(run, kind(), 9)


ANEW = r"the training stream begins epoch 2 of a resumed run as the first epoch began, and otherwise when it is asked once more"


@pytest.mark.parametrize("save_every", [None, "1epoch"])
@pytest.mark.parametrize("kind", [Shuffled, GoesOn])
def test_nor_is_it_at_the_end_of_one(kind: type[Shuffled], save_every: str | None, tmp_path: Path) -> None:
    """All of it is read again, to see that it is over."""
    with opened(out=tmp_path, save_every=save_every) as run:
        train(run, kind(), 8)
    with resumed(tmp_path) as run, pytest.raises(InputError, match=OTHERS):
        train(run, kind(), 9)


@pytest.mark.parametrize("kind", [Shuffled, GoesOn])
def test_nor_where_it_was_killed_behind_one(kind: type[Shuffled], tmp_path: Path) -> None:
    with opened(out=tmp_path, save_every="1epoch") as run, suppress(KeyboardInterrupt):
        model, _ = prepared(run)
        for step in run.steps(kind(), batch_size=8, steps=12):
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
            if step.number == 9:
                raise KeyboardInterrupt
    with resumed(tmp_path) as run, pytest.raises(InputError, match=ANEW):
        train(run, kind(), 12)


class Sized(Shuffled):
    """Whose epochs are known to be over before they are read to their end."""

    def __len__(self) -> int:
        return 30


@pytest.mark.parametrize("times", [0, 1, 2])
def test_nor_where_it_was_resumed_and_saved_again_before_a_step(times: int, tmp_path: Path) -> None:
    def train_and_save(run: Run, steps: int) -> None:
        model, _ = prepared(run)
        for step in run.steps(Sized(), batch_size=8, steps=steps):
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
        run.save()
        run._engine.calls.finish()

    with opened(out=tmp_path) as run:
        train_and_save(run, 8)
    for _ in range(times):
        with resumed(tmp_path) as run:
            train_and_save(run, 8)
    with resumed(tmp_path) as run, pytest.raises(InputError, match=ANEW):
        train_and_save(run, 9)


def test_nor_behind_its_first_epoch(tmp_path: Path) -> None:
    """Where every epoch so far began as the first."""
    with opened(out=tmp_path) as run:
        train(run, Sized(), 4)
    with resumed(tmp_path) as run, pytest.raises(InputError, match=ANEW.replace("2", "1")):
        train(run, Sized(), 8)


class Told(Sized):
    """By its own generator, though it is told the epochs."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class ToldAnew(Anew):
    """By one that is made when the epoch is told, and that a second reading moves."""

    def __len__(self) -> int:
        return 30


@pytest.mark.parametrize("steps", [4, 8])
def test_nor_is_one_that_is_told_the_epochs_and_makes_nothing_of_them(steps: int, tmp_path: Path) -> None:
    with opened(out=tmp_path) as run:
        train(run, Told(), steps)
    anew = ANEW.replace("2", str(steps // 4))
    with resumed(tmp_path) as run, pytest.raises(InputError, match=anew):
        train(run, Told(), 12)
    with opened() as run:
        whole = train(run, ToldAnew(), 12)
    with opened(out=tmp_path / "anew") as run:
        train(run, ToldAnew(), steps)
    with resumed(tmp_path / "anew") as run:
        assert torch.equal(train(run, ToldAnew(), 12), whole)


class Counts(Sized):
    """By the epochs that it has counted itself, where they end."""

    epoch = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from map(item, random.Random(self.epoch).sample(range(30), 30))
        self.epoch += 1


class Fixed(Sized):
    """The same order in each epoch."""

    def order(self) -> list[int]:
        return list(range(30))


@pytest.mark.parametrize(("kind", "said"), [(Counts, 1), (Fixed, 0)])
def test_one_that_begins_as_the_first_epoch_and_not_as_the_last_is_told_of(
    kind: type[Shuffled], said: int, tmp_path: Path
) -> None:
    with opened(out=tmp_path) as run:
        train(run, kind(), 8)
    heard: list[Any] = []
    with resumed(tmp_path) as run:
        run._engine.state.emit = heard.append
        train(run, kind(), 9)
    notes = [one.text for one in heard if isinstance(one, Note)]
    assert (
        len([one for one in notes if "begins epoch 2 of a resumed run as the first epoch began" in one])
        == said
    )


class Files(Shuffled):
    """Two files in an order that is drawn from the process's own generator: many epochs begin alike."""

    def __len__(self) -> int:
        return 30

    def order(self) -> list[int]:
        files = [list(range(15)), list(range(15, 30))]
        random.shuffle(files)
        return [*files[0], *files[1]]


class Place(Files):
    """Which keeps its place within an epoch in itself, where a second reader moves it."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.now, self.place = self.order(), 0
        while self.place < len(self.now):
            self.place += 1
            yield item(self.now[self.place - 1])


@pytest.mark.parametrize("kind", [Files, Place])
def test_one_that_begins_as_the_first_epoch_by_chance_is_resumed(kind: type, tmp_path: Path) -> None:
    with opened() as run:
        whole = train(run, kind(), 40)
    asked = 0
    for steps in range(4, 41, 4):
        with opened(out=tmp_path, resume=steps > 4) as run:
            starts = run._engine.state.epoch_starts
            confirm = starts.confirm

            def counted(*args: Any, confirm: Any = confirm) -> None:
                nonlocal asked
                asked += 1
                confirm(*args)

            starts.confirm = counted  # type: ignore[method-assign]
            found = train(run, kind(), steps)
    assert asked, "some begin as the first did, and not as the last"
    assert torch.equal(found, whole)


class Levels(Shuffled):
    """Other items from the second epoch on, by a state that is registered."""

    def __init__(self, level: dict[str, int]) -> None:
        super().__init__()
        self.level = level

    def __len__(self) -> int:
        return 30

    def order(self) -> list[int]:
        return list(range(30 * self.level["now"], 30 * self.level["now"] + 30))


def test_one_whose_epochs_begin_alike_from_the_second_on_is_resumed(tmp_path: Path) -> None:
    def train_levels(run: Run, steps: int) -> Tensor:
        model, _ = prepared(run)
        level = run.register("level", {"now": 0})
        for step in run.steps(Levels(level), batch_size=8, steps=steps):
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
            level["now"] = min(1, (step.number + 1) // 4)
        run._engine.calls.finish()
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    with opened() as run:
        whole = train_levels(run, 14)
    for steps in (4, 8, 12, 14):
        with opened(out=tmp_path, resume=steps > 4) as run:
            found = train_levels(run, steps)
    assert torch.equal(found, whole)


def test_the_second_call_has_a_first_epoch_of_its_own(tmp_path: Path) -> None:
    def train_twice(run: Run, epochs: int) -> None:
        model, _ = prepared(run)
        for stream, how_many in ((GoesOn(), 1), (Shuffled(), epochs)):
            for step in run.steps(stream, batch_size=8, epochs=how_many):
                for batch in step:
                    step.backward(losses(model, batch))
                step.apply()
        run._engine.calls.finish()

    with opened(out=tmp_path) as run:
        train_twice(run, 2)
    with resumed(tmp_path) as run, pytest.raises(InputError, match=ANEW.replace("2", "3")):
        train_twice(run, 3)


def test_one_that_joins_knows_what_the_others_know() -> None:
    loader = ShardedLoader(Shuffled(), batch_size=8, shards=1, seed=0, owned=range(1), num_workers=0)
    knows, joins, goes_back = EpochStarts(), EpochStarts(), EpochStarts()
    for epoch in range(2):
        for data in loader.epoch(epoch):
            knows.check(Position(epoch, data.step), data, by_epoch=False)
    at = Position(2, 0)
    joins.adopt(at, at, knows.at(at))
    assert joins.at(at) == knows.at(at)
    goes_back.adopt(Position(1, 0), at, knows.at(at))
    told = goes_back.at(Position(1, 0))
    assert told is not None
    assert told["first"] == knows.at(at)["first"]  # type: ignore[index]
    assert told["last"] == ""


@pytest.mark.parametrize(("kind", "said"), [(Shuffled, 1), (GoesOn, 1), (Anew, 0), (Global, 0)])
def test_between_two_calls_it_is_said(kind: type[Shuffled], said: int, tmp_path: Path) -> None:
    """Another call may have another stream, which begins like the first for good reason."""
    notes: list[str] = []
    for epochs in (2, 3):
        with opened(out=tmp_path, resume=epochs == 3) as run:
            run._engine.state.emit = lambda event: notes.append(getattr(event, "text", ""))
            model, _ = prepared(run)
            stream = kind()
            for _ in range(epochs):
                for step in run.steps(stream, batch_size=8, epochs=1):
                    for batch in step:
                        step.backward(losses(model, batch))
                    step.apply()
            run._engine.calls.finish()
    assert sum("as the first epoch began" in note for note in notes) == said


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Anew, Global])
def test_one_that_gives_the_same_again_is_resumed_anywhere(
    kind: type[Shuffled], num_workers: int, tmp_path: Path
) -> None:
    with opened(num_workers=num_workers) as run:
        whole = train(run, kind(), 11)
    for steps in (2, 4, 6, 11):  # 4 steps an epoch
        with opened(out=tmp_path, resume=steps > 2, num_workers=num_workers) as run:
            found = train(run, kind(), steps)
    assert torch.equal(found, whole)


class Rotates(Shuffled):
    """Begins every second epoch alike, by the epoch that it is told."""

    def set_epoch(self, epoch: int) -> None:
        self.first = 10 * (epoch % 2)

    def order(self) -> list[int]:
        return [(number + self.first) % 30 for number in range(30)]


@pytest.mark.parametrize("save_every", [None, "1epoch"])
def test_one_that_is_told_the_epoch_may_begin_two_alike(save_every: str | None, tmp_path: Path) -> None:
    with opened() as run:
        whole = train(run, Rotates(), 14)
    for steps in (8, 12, 14):
        with opened(out=tmp_path, resume=steps > 8, save_every=save_every) as run:
            found = train(run, Rotates(), steps)
    assert torch.equal(found, whole)


def test_one_that_is_copied_for_each_epoch_by_a_loading_process_is_resumed(tmp_path: Path) -> None:
    with opened(num_workers=1) as run:
        whole = train(run, Shuffled(), 9)
    for steps in (6, 9):
        with opened(out=tmp_path, resume=steps == 9, num_workers=1) as run:
            found = train(run, Shuffled(), steps)
    assert torch.equal(found, whole)


def test_one_that_seeks_is_not_compared(tmp_path: Path) -> None:
    for steps in (6, 9):
        with opened(out=tmp_path, resume=steps == 9) as run:
            train(run, Seeks(), steps)


def test_a_checkpoint_that_says_nothing_of_its_stream_is_resumed(tmp_path: Path) -> None:
    with opened(out=tmp_path) as run:
        train(run, Shuffled(), 6)
        run._engine.state.epoch_starts = EpochStarts()
        run.save()
    (rest,) = tmp_path.rglob(EXTRA_STATE)
    assert "stream" not in torch.load(rest)
    with resumed(tmp_path) as run:
        train(run, Shuffled(), 9)


class Objects(Shuffled):
    """Items of which nothing can be compared."""

    def __iter__(self) -> Iterator[Any]:
        return ((Hidden(number),) for number in self.order())


class Hidden:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize("kept", [True, False])
def test_it_is_said_once_that_items_cannot_be_compared(kept: bool, tmp_path: Path) -> None:
    notes: list[str] = []
    loader = DataLoader(
        Objects(),  # type: ignore[arg-type]
        batch_size=8,
        collate_fn=lambda items: tuple(
            map(torch.stack, zip(*(item(one.number) for (one,) in items), strict=True))
        ),
    )
    for steps in (6, 9)[: 1 + kept]:
        with opened(out=tmp_path if kept else None, resume=steps == 9) as run:
            run._engine.state.emit = lambda event: notes.append(getattr(event, "text", ""))
            model, _ = prepared(run)
            for step in run.steps(loader, steps=steps):
                for batch in step:
                    step.backward(losses(model, batch))
                step.apply()
            run._engine.calls.finish()
    said = [text for text in notes if "nothing that can be compared" in text]
    assert len(said) == 2 * kept
    assert all(text.startswith("the items of the training stream hold ") for text in said)


def test_each_call_of_steps_has_data_of_its_own(tmp_path: Path) -> None:
    with opened(out=tmp_path) as run:
        model, _ = prepared(run)
        for stream in (Shuffled(), GoesOn()):
            for step in run.steps(stream, batch_size=8, epochs=2):
                if step.number == 0:
                    break  # before it is applied: the next call is of the same epoch
                for batch in step:
                    step.backward(losses(model, batch))
                step.apply()


def test_an_epoch_that_is_read_again_by_another_group_is_compared() -> None:
    def read(stream: Any, epoch: int, step: int) -> None:
        position = Position(epoch, step)
        for data in loaders[stream].epoch(epoch, step):
            starts[stream].check(position, data, by_epoch=False)

    streams = Shuffled(), Global()
    loaders = {
        one: ShardedLoader(one, batch_size=8, shards=1, seed=0, owned=range(1), num_workers=0)
        for one in streams
    }
    starts = {one: EpochStarts() for one in streams}
    for one in streams:
        read(one, 0, 0)
        read(one, 1, 0)
    read(streams[1], 1, 2)
    read(streams[1], 0, 1)
    with pytest.raises(InputError, match="the training stream gives other items in epoch 1"):
        read(streams[0], 1, 2)

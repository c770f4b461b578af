"""Two writers of one run, and a reader beside them, end with whole checkpoints and no error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.checkpoint import load
from paceline.errors import CheckpointError
from paceline.world import fault_points
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import PART, assert_same, refuse, run_state
from tests.unit.checkpoint.victims import FORKSERVER, executioner, save_one
from tests.unit.checkpoint.writer import save_each, save_forever


@pytest.fixture
def in_the_middle() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Give a way to have something happen once, in the middle of this process's next save."""

    def arrange(happening: Callable[[], object]) -> None:
        def trap(name: str) -> None:
            if name == fault_points.CHECKPOINT:
                fault_points.set_fault(None)
                happening()

        fault_points.set_fault(trap)

    yield arrange
    fault_points.set_fault(None)


def test_the_slower_of_two_finds_its_work_done(
    tmp_path: Path, in_the_middle: Callable[[Callable[[], object]], None]
) -> None:
    with executioner() as have_done:
        in_the_middle(lambda: have_done(save_one, tmp_path, 1))
        path = Checkpoints(tmp_path).save(1, run_state(1))
    assert_same(load(path).state, run_state(1))
    assert [one.name for one in tmp_path.iterdir()] == ["step-1"]


def test_the_slower_of_two_replaces_a_damaged_one(
    tmp_path: Path, in_the_middle: Callable[[Callable[[], object]], None]
) -> None:
    def save_and_damage() -> None:
        have_done(save_one, tmp_path, 1)
        (tmp_path / "step-1" / PART).write_bytes(b"half")

    with executioner() as have_done:
        in_the_middle(save_and_damage)
        path = Checkpoints(tmp_path).save(1, run_state(1))
    assert_same(load(path).state, run_state(1))
    assert [one.name for one in tmp_path.iterdir()] == ["step-1"]


def test_the_slower_of_two_with_another_state_is_refused(
    tmp_path: Path, in_the_middle: Callable[[Callable[[], object]], None]
) -> None:
    with executioner() as have_done:
        in_the_middle(lambda: have_done(save_one, tmp_path, 1))
        with pytest.raises(CheckpointError, match="holds another state"):
            Checkpoints(tmp_path).save(1, run_state(1) | {"model": run_state(2)["model"]})
    assert_same(load(tmp_path / "step-1").state, run_state(1))
    assert [one.name for one in tmp_path.iterdir()] == ["step-1"]


def test_two_at_once_step_after_step(tmp_path: Path) -> None:
    together = FORKSERVER.Barrier(2)
    writers = [FORKSERVER.Process(target=save_each, args=(tmp_path, 30, together)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
        writer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"step-29", "step-30"}
    for step in (29, 30):
        assert_same(load(tmp_path / f"step-{step}").state, run_state(step))


def test_a_reader_never_misses_what_is_there(tmp_path: Path) -> None:
    """With one checkpoint kept, the one a reader has found may be deleted before it is read."""
    receiving, sending = FORKSERVER.Pipe(duplex=False)
    writer = FORKSERVER.Process(target=save_forever, args=(tmp_path, 1, sending, 1))
    writer.start()
    sending.close()
    with receiving:
        told = receiving.recv()
        for _ in range(300):
            newest = Checkpoints(tmp_path).newest(refuse)
            assert newest is not None
            assert newest.step >= told
            while receiving.poll():
                told = receiving.recv()
        writer.kill()
        writer.join()
        writer.close()

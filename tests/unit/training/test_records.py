"""The books of a run: chained from checkpoint to checkpoint, whoever is ahead, whoever comes and goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from paceline.data import ShardedLoader
from paceline.data.shards import owned_shards, shard_bounds
from paceline.records import ledger
from paceline.records.receipt import NAME, Receipt
from paceline.recovery.position import Position
from paceline.training.description import describe_start
from paceline.training.options import RunOptions
from paceline.training.recorder import Records
from paceline.verify.receipts.audit import audit
from paceline.world import Identity, World, alone, broadcast_object, connect

SAMPLES, BATCH, SHARDS, SEED = 45, 10, 4, 5


@dataclass(frozen=True)
class Shard:
    index: int
    samples: Any


@dataclass(frozen=True)
class Work:
    shards: list[Shard]


@dataclass(frozen=True)
class Step:
    """As much of a step as goes on record."""

    work: Work


class Worker:
    """One worker's books and the data it serves, without a model."""

    def __init__(self, folder: Path, world: World, owned: range, *, resume: bool = False) -> None:
        self.options = RunOptions(out=folder, shards=SHARDS, seed=SEED, resume=resume)
        self.folder, self.world, self.owned = folder, world, owned
        self.position = Position()
        self.loader = ShardedLoader(
            range(SAMPLES), batch_size=BATCH, shards=SHARDS, seed=SEED, owned=range(SHARDS), shuffle=True
        )
        self.books = Records(folder, world, resume=self.options.resume, note=pytest.fail)

    def describe(self) -> Receipt:
        start = describe_start(
            self.options,
            self.world,
            self.position,
            self.loader,
            exactness="bitwise",
            max_grad_norm=None,
            about={},
        )
        return Receipt(name="books", seed=SEED, shards=SHARDS, batch_size=BATCH, history=(start,))

    def begin(self) -> None:
        self.books.begin(self.describe)

    def regroup(self, world: World, owned: range) -> None:
        self.world, self.owned = world, owned
        self.books.regroup(world, self.describe)

    def serve(self) -> None:
        """Record the step that comes next, without taking it."""
        position, batch = self.position, BATCH
        order = self.loader.order
        assert order is not None
        low = position.step * batch
        ids = order.indices(position.epoch, low, min(low + batch, SAMPLES))
        parts = [Shard(index, ids[slice(*shard_bounds(index, SHARDS, len(ids)))]) for index in self.owned]
        self.books.step(Step(Work(parts)), position)  # type: ignore[arg-type]

    def apply(self) -> None:
        self.position = self.position.after_step()
        if self.position.step * BATCH >= SAMPLES:
            self.position = self.position.next_epoch()

    def take(self, until: int) -> None:
        while self.position.number < until:
            self.serve()
            self.apply()

    def save(self) -> None:
        self.books.before_save()
        self.books.after_save(self.position.number, f"{self.position.number:064x}")


def test_what_others_have_recorded_already_is_not_lost_to_the_chain(tmp_path: Path) -> None:
    """Rank 1 goes on with the next steps while rank 0 still writes the checkpoint."""
    first = Worker(tmp_path, alone(), range(2))
    first.begin()
    other = ledger.Ledger(tmp_path, 1, 0)

    def serve(number: int) -> None:
        ids = np.arange(2, dtype=np.int64) + number
        other.step(number, 0, number, [Shard(2, ids), Shard(3, ids)])

    for number in range(5):
        serve(number)
    other.flush()
    first.take(3)
    first.save()
    first.take(5)
    first.save()
    other.close()
    first.books.close()
    chains = [point.chain for point in Receipt.read(tmp_path).checkpoints.values()]
    assert None not in chains


def chained(folder: Path) -> dict[int, str | None]:
    return {step: point.chain for step, point in Receipt.read(folder).checkpoints.items()}


def generations(folder: Path) -> list[tuple[int, int]]:
    return [(start.step, start.generation) for start in Receipt.read(folder).history]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str | None]:
    """The chain of a run in which nothing happens, at each of its steps."""
    worker = Worker(tmp_path_factory.mktemp("undisturbed"), alone(), range(SHARDS))
    worker.begin()
    for step in range(1, 13):
        worker.take(step)
        worker.save()
    worker.books.close()
    found = chained(worker.folder)
    assert None not in found.values()
    return found


def test_a_step_that_the_loop_left_and_asks_for_again_counts_once(
    tmp_path: Path, undisturbed: dict[int, str | None]
) -> None:
    worker = Worker(tmp_path, alone(), range(SHARDS))
    worker.begin()
    worker.take(3)
    worker.serve()
    worker.begin()
    worker.take(6)
    worker.save()
    worker.books.close()
    assert generations(tmp_path) == [(0, 0), (3, 1)]
    assert chained(tmp_path) == {6: undisturbed[6]}
    found = audit(tmp_path)
    assert found.holds, found.problems
    assert found.superseded == SHARDS


def test_another_process_speaks_for_all_and_the_first_one_again(
    tmp_path: Path, undisturbed: dict[int, str | None]
) -> None:
    """Neither goes by what it remembers of the receipt."""
    one, other = (Worker(tmp_path, alone(), range(SHARDS)) for _ in range(2))
    one.begin()
    one.take(3)
    one.save()
    one.serve()
    other.position = one.position
    other.regroup(alone(), range(SHARDS))
    other.regroup(alone(), range(SHARDS))
    other.take(4)
    other.serve()
    one.position = other.position
    one.regroup(alone(), range(SHARDS))
    one.take(7)
    one.save()
    other.position = one.position
    other.regroup(alone(), range(SHARDS))
    other.take(9)
    other.save()
    other.books.finish()
    one.books.close()
    other.books.close()
    assert generations(tmp_path) == [(0, 0), (3, 1), (3, 2), (4, 3), (7, 4)]
    assert chained(tmp_path) == {step: undisturbed[step] for step in (3, 7, 9)}
    assert list(ledger.paths(tmp_path)) == [(0, 0), (0, 1)]
    found = audit(tmp_path)
    assert found.holds, found.problems
    assert (found.superseded, found.finished) == (2 * SHARDS, True)


def test_a_checkpoint_that_the_receipt_never_heard_of(
    tmp_path: Path, undisturbed: dict[int, str | None]
) -> None:
    """Killed between the two, and resumed from that checkpoint."""
    worker = Worker(tmp_path, alone(), range(SHARDS))
    worker.begin()
    worker.take(3)
    worker.save()
    worker.take(5)
    worker.books.close()
    again = Worker(tmp_path, alone(), range(SHARDS), resume=True)
    again.position = worker.position
    again.begin()
    again.take(8)
    again.save()
    again.books.close()
    assert chained(tmp_path) == {step: undisturbed[step] for step in (3, 8)}
    assert audit(tmp_path).holds


def test_going_back_behind_a_checkpoint(tmp_path: Path, undisturbed: dict[int, str | None]) -> None:
    """The newest one was damaged, say, and no survivor had the state."""
    worker = Worker(tmp_path, alone(), range(SHARDS))
    worker.begin()
    worker.take(2)
    worker.save()
    before = worker.position
    worker.take(6)
    worker.save()
    worker.position = before
    worker.regroup(alone(), range(SHARDS))
    worker.take(4)
    worker.save()
    worker.take(7)
    worker.save()
    worker.books.close()
    assert chained(tmp_path) == {step: undisturbed[step] for step in (2, 4, 7)}
    assert audit(tmp_path).holds


def test_a_group_that_forms_before_there_is_a_receipt(tmp_path: Path) -> None:
    """Rank 0 was killed before it had written one."""
    worker = Worker(tmp_path, alone(), range(SHARDS))
    worker.regroup(alone(), range(SHARDS))
    worker.take(2)
    worker.save()
    worker.books.close()
    assert generations(tmp_path) == [(0, 0)]
    assert audit(tmp_path).holds


@pytest.mark.parametrize("resume", [True, False])
def test_what_an_earlier_start_wrote_is_kept_where_its_receipt_is_gone(tmp_path: Path, resume: bool) -> None:
    """The errors of a receipt themselves advise to remove it."""
    worker = Worker(tmp_path, alone(), range(SHARDS))
    worker.begin()
    worker.take(3)
    worker.save()
    worker.books.close()
    (tmp_path / NAME).unlink()
    before = {path: path.read_bytes() for path in ledger.paths(tmp_path).values()}
    again = Worker(tmp_path, alone(), range(SHARDS), resume=resume)
    again.position = worker.position if resume else Position()
    again.begin()
    again.take(6)
    again.save()
    again.books.close()
    assert before
    assert {path: path.read_bytes() for path in before} == before
    assert generations(tmp_path) == [(3 if resume else 0, 1)]
    found = audit(tmp_path)
    assert found.lost == 0
    assert found.superseded == 3 * SHARDS
    if resume:
        assert found.problems[0].startswith("steps 0 to 2 are in no start that the receipt knows")
    else:
        assert found.holds, found.problems


# Real workers, killed in the middle of it.

ROOT = Path(__file__).parents[3]
LAST = 12


class Life:
    """What one process goes through, from group to group."""

    def __init__(self, folder: Path, port: int) -> None:
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        self.worker = Worker(folder, alone(), range(0))

    def enter(self, generation: int, rank: int, size: int) -> None:
        """Join a group and go on where its first rank stands."""
        worker = self.worker
        worker.world.close()
        identity = Identity(rank=rank, size=size, local_rank=rank, local_size=size)
        world = connect(identity, store=self.store, device="cpu", timeout_s=60, generation=generation)
        owned = owned_shards(rank, size, SHARDS)
        worker.position = broadcast_object(world.comm, worker.position)
        if generation:
            worker.regroup(world, owned)
        else:
            worker.world, worker.owned = world, owned
            worker.books = Records(worker.folder, world, resume=worker.options.resume, note=pytest.fail)
            worker.begin()

    def take(self, until: int, *, die_at: int | None = None) -> None:
        """Take steps together; at the step `die_at` this process is gone before the others have its part."""
        while self.worker.position.number < until:
            self.worker.serve()
            if self.worker.position.number == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.worker.world.comm.barrier()
            self.worker.apply()


def live(folder: str, port: str, who: str) -> None:
    """Three begin; the first is lost at step 5 and replaced, the replacement at 7, then one more in the regroup itself."""
    torch.set_num_threads(1)
    life = Life(Path(folder), int(port))
    if who != "newcomer":
        life.enter(0, int(who), 3)
        life.take(3)
        life.worker.save()
        with pytest.raises(RuntimeError):
            life.take(LAST, die_at=5 if who == "0" else None)
    # The one that was last speaks for all from now on.
    rank = {"2": 0, "1": 1, "newcomer": 2}[who]
    life.enter(1, rank, 3)
    with pytest.raises(RuntimeError):
        life.take(LAST, die_at=7 if who == "newcomer" else None)
    if who == "1":
        life.worker.describe = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    with pytest.raises(RuntimeError):
        life.enter(2, {"1": 0, "2": 1}[who], 2)
    life.enter(3, 0, 1)
    life.take(LAST)
    life.worker.save()
    life.worker.books.finish()
    life.worker.books.close()


def test_workers_that_are_killed_and_join_lose_and_repeat_nothing(
    tmp_path: Path, undisturbed: dict[int, str | None]
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = "import sys; from tests.unit.training.test_records import live; live(*sys.argv[1:])"
    processes = {
        who: subprocess.Popen([sys.executable, "-c", call, str(tmp_path), str(store.port), who], cwd=ROOT)
        for who in ("0", "1", "2", "newcomer")
    }
    try:
        ends = {who: process.wait(timeout=120) for who, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    killed = -signal.SIGKILL
    assert ends == {"0": killed, "1": killed, "2": 0, "newcomer": killed}
    # The regroup that was killed before it had written anything does not count.
    assert generations(tmp_path) == [(0, 0), (5, 1), (7, 2)]
    assert list(ledger.paths(tmp_path)) == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert chained(tmp_path) == {step: undisturbed[step] for step in (3, LAST)}
    found = audit(tmp_path)
    assert found.holds, found.problems
    assert (found.lost, found.repeated, found.superseded) == (0, 0, 2 * SHARDS)
    assert found.samples == 2 * SAMPLES + 2 * BATCH

"""Loading processes read what the worker itself would read, stay between epochs, and end when told to."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data import StepData
from paceline.data.failures import LoaderFailure
from paceline.errors import LoadingProcessError, PacelineError
from tests.patience import Stopwatch
from tests.unit.data.sources import (
    Faulty,
    Noisy,
    Squares,
    Stream,
    TwoPartError,
    combined,
    comparable,
    loader_of,
)


def test_processes_read_the_same_as_the_worker_itself_and_leave_no_trace() -> None:
    before = torch.get_rng_state()
    alone = combined(Noisy(21), workers=1, micro_batch=1)
    assert combined(Noisy(21), workers=1, micro_batch=1, num_workers=2) == alone
    assert torch.equal(torch.get_rng_state(), before)
    assert multiprocessing.active_children() == []


class WhoReads(Squares):
    started = -1

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([os.getpid(), WhoReads.started])


def note_start(number: int) -> None:
    WhoReads.started = number


def readers(steps: list[StepData]) -> set[tuple[int, int]]:
    return {
        tuple(row)
        for step in steps
        for shard in step.shards
        for batch in shard.batches
        for row in batch.tolist()
    }


def test_processes_may_stay_between_epochs_are_initialised_and_may_be_left_early() -> None:
    loader = loader_of(WhoReads(64), num_workers=2, worker_init_fn=note_start, persistent_workers=True)
    try:
        first = readers(list(loader.epoch(0)))
        abandoned = loader.epoch(1)
        next(abandoned)
        again = list(loader.epoch(2, 3))
        assert [step.step for step in again] == [3, 4, 5, 6, 7]
        assert readers(again) == first
        assert {number for _, number in first} == {0, 1}
        assert os.getpid() not in {pid for pid, _ in first}
    finally:
        loader.close()
    assert multiprocessing.active_children() == []


def test_processes_of_an_epoch_that_was_left_early_end_with_the_next() -> None:
    loader = loader_of(WhoReads(64), num_workers=2)
    try:
        first = loader.epoch(0)
        next(first)
        before = {child.pid for child in multiprocessing.active_children()}
        steps = list(loader.epoch(1))
        after = {child.pid for child in multiprocessing.active_children()}
    finally:
        loader.close()
    assert len(before) == 2
    assert not before & ({pid for pid, _ in readers(steps)} | after)
    assert multiprocessing.active_children() == []


class Finalised:
    """Says in which process it was taken down; of a process group that hangs where its threads are not."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.itself = folder, self

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


class Collecting(Squares):
    def __getitem__(self, index: int) -> Any:
        gc.collect()
        return index


class CollectingStream(Stream):
    def __iter__(self) -> Any:
        gc.collect()
        return super().__iter__()


@pytest.mark.parametrize("dataset", [Collecting(16), CollectingStream(16)])
def test_garbage_is_taken_down_where_it_was_made(dataset: Any, tmp_path: Path) -> None:
    loader = loader_of(dataset, num_workers=1)
    gc.collect()
    gc.disable()
    try:
        Finalised(tmp_path)
        list(loader.epoch(0))
        assert list(tmp_path.iterdir()) == []
        gc.collect()
        assert [one.name for one in tmp_path.iterdir()] == [str(os.getpid())]
    finally:
        gc.enable()
        loader.close()


@pytest.mark.parametrize("error", [TwoPartError("box", 3), KeyError("missing")])
def test_an_error_keeps_its_type_message_and_notes(error: Exception) -> None:
    loader = loader_of(Faulty(20, bad=13, error=error), num_workers=1)
    with pytest.raises(type(error)) as caught:
        list(loader.epoch(0))
    loader.close()
    assert str(caught.value) == str(error)
    assert vars(caught.value).get("number") == vars(error).get("number")
    assert any("sample 13 " in note for note in caught.value.__notes__)
    assert any("Traceback in the loading process" in note for note in caught.value.__notes__)


class Dying(Squares):
    """Its loading process is killed at one sample."""

    def __getitem__(self, index: int) -> Any:
        if index == 13 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_loading_process_that_is_killed_is_named() -> None:
    loader = loader_of(Dying(20), num_workers=1)
    with pytest.raises(
        LoadingProcessError, match=r"^its loading process 0 \(pid \d+\) was killed by SIGKILL$"
    ):
        list(loader.epoch(0))
    loader.close()


def test_an_error_of_a_class_without_a_name_still_says_what_it_was() -> None:
    class LocalError(Exception):
        pass

    arrived = LoaderFailure.of(LocalError("odd")).unpack()
    assert type(arrived) is PacelineError
    assert "LocalError: odd" in str(arrived)


class StreamOfPids(Stream):
    def __iter__(self) -> Any:
        for item in super().__iter__():
            info = get_worker_info()
            assert info is not None
            assert info.num_workers == 1
            yield item


def test_a_stream_is_read_ahead_by_one_process() -> None:
    inside = combined(Stream(21), workers=1)
    assert combined(StreamOfPids(21), workers=2, num_workers=2) == inside
    loader = loader_of(Stream(64), num_workers=1)
    next(loader.epoch(0))
    resumed = [comparable(step) for step in loader.epoch(1, 5)]
    loader.close()
    assert resumed == [comparable(step) for step in loader_of(Stream(64)).epoch(1, 5)]
    assert multiprocessing.active_children() == []


class Numbers(IterableDataset[int]):
    """As in the documentation of torch's IterableDataset."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def take_own_part(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    numbers: Any = info.dataset
    overall_start, overall_end = numbers.start, numbers.end
    per_worker = math.ceil((overall_end - overall_start) / info.num_workers)
    numbers.start = overall_start + worker * per_worker
    numbers.end = min(numbers.start + per_worker, overall_end)


def open_files(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.factor *= 10


class Opened(Squares):
    factor = 1

    def __getitem__(self, index: int) -> int:
        return index * self.factor


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_first_thing_that_a_process_does_finds_the_data_set_itself(num_workers: int) -> None:
    numbers, opened = Numbers(3, 24), Opened(21)
    for _ in range(2):
        read = combined(numbers, workers=1, num_workers=num_workers, worker_init_fn=take_own_part)
        assert read == combined(Numbers(3, 24), workers=1)
    loader = loader_of(opened, num_workers=num_workers, worker_init_fn=open_files)
    for epoch in range(2):
        read = [
            value
            for step in loader.epoch(epoch)
            for shard in comparable(step)
            for batch in shard[2]
            for value in batch
        ]
        assert sorted(read) == [10 * number for number in range(21)]
    loader.close()
    assert (numbers.start, opened.factor) == (3, 1)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_loading_processes_die_with_a_killed_worker() -> None:
    script = """
        import time, multiprocessing
        from tests.unit.data.sources import Squares, loader_of
        loader = loader_of(Squares(64), num_workers=2)
        list(loader.epoch(0))  # to its end: one killed while it hands a tensor over leaves torch's file behind
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        time.sleep(60)
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert worker.stdout is not None
    try:
        loaders = [int(word) for word in worker.stdout.readline().split()]
        assert len(loaders) == 2
        assert all(alive(pid) for pid in loaders)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
    # torch's own watch over the parent looks only every 5 seconds.
    watch = Stopwatch()
    while any(alive(pid) for pid in loaders) and watch.seconds() < 3:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in loaders)


FULL = """
import torch
from paceline.data import ShardedLoader
from paceline.errors import InputError
loader = ShardedLoader(torch.ones(8, 2), batch_size=2, shards=1, seed=0, num_workers=1, owned=range(1))
try:
    next(loader.epoch(0))
except InputError as error:
    print(error)
"""


def test_a_full_shared_memory_is_named() -> None:
    mount = "mount -t tmpfs -o size=4k none /dev/shm && echo > /dev/shm/x"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    command += [sys.executable, "-c", FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip("a file system cannot be mounted here")
    assert (
        "cannot be started: their locks lie in /dev/shm (No space left on device). Enlarge it" in done.stdout
    ), done.stderr

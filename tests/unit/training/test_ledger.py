"""The ledger: what was appended outlives a kill, a torn tail is dropped, and the chain sees every change."""

from __future__ import annotations

import hashlib
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.shards import owned_shards
from paceline.errors import InputError, RecordsError
from paceline.records import ledger
from paceline.records.receipt import FIRST_LINK
from tests.patience import HANG_S


@dataclass(frozen=True)
class Shard:
    index: int
    samples: Any


def shard(index: int, *ids: int) -> Shard:
    return Shard(index, np.array(ids, dtype=np.int64))


def append(folder: Path, *steps: int, generation: int = 0) -> Path:
    book = ledger.Ledger(folder, 0, 0)
    book.generation = generation
    for step in steps:
        book.step(step, 0, step, [shard(0, step, 10 * step)])
    book.close()
    return book.path


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    book = ledger.Ledger(tmp_path, 3, 7)
    book.step(40, 1, 17, [shard(2, 5, 3, 9), shard(3)])
    book.close()
    book.close()
    first, second = ledger.read(ledger.paths(tmp_path)[ledger.Origin(3, 7)])
    assert [int(first[name]) for name in ("generation", "epoch", "number", "step", "shard", "count")] == [
        7,
        1,
        40,
        17,
        2,
        3,
    ]
    ids = np.array([5, 3, 9], dtype="<i8").tobytes()
    assert first["digest"].tobytes() == hashlib.blake2b(ids, digest_size=16).digest()
    assert (int(second["shard"]), int(second["count"])) == (3, 0)
    assert second["digest"].tobytes() == hashlib.blake2b(b"", digest_size=16).digest()


def test_the_order_of_samples_counts() -> None:
    assert ledger.digest(shard(0, 1, 2).samples) != ledger.digest(shard(0, 2, 1).samples)


WRITER = """
import itertools, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from paceline.records import ledger

book = ledger.Ledger(Path(sys.argv[1]), 0, 0)
for step in itertools.count():
    ids = [np.array([step, index], dtype=np.int64) for index in range(3)]
    book.step(step, 0, step, [SimpleNamespace(index=index, samples=ids[index]) for index in range(3)])
"""


@pytest.mark.parametrize("records", [1, 5_000])
def test_records_outlive_a_kill_at_any_moment(tmp_path: Path, records: int) -> None:
    """5,000 records do not fit into the room that is reserved first."""
    path = tmp_path / ledger.FOLDER / "rank-0-from-0.bin"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) as process:
        deadline = time.monotonic() + HANG_S
        while not path.exists() or (seen := len(ledger.read(path))) < records:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    found = ledger.read(path)
    assert process.returncode == -signal.SIGKILL
    assert len(found) >= seen
    written = len(ledger.MAGIC) + len(found) * ledger.RECORD.itemsize
    # In bytes: it may have been killed when its room was full, with less than a record's left.
    assert path.stat().st_size > written, "nobody was left to cut the file"
    steps = len(found) // 3
    assert found["number"].tolist() == np.repeat(np.arange(steps), 3).tolist()
    assert found["shard"].tolist() == [0, 1, 2] * steps
    last = hashlib.blake2b(np.array([steps - 1, 2], dtype="<i8").tobytes(), digest_size=16).digest()
    assert found[-1]["digest"].tobytes() == last
    append(tmp_path, steps)
    assert ledger.capacity(path) == len(found) + 1
    assert ledger.read(path, len(found))["number"].tolist() == [steps]


def test_others_read_what_was_recorded_while_it_is_open(tmp_path: Path) -> None:
    book = ledger.Ledger(tmp_path, 0, 0)
    assert len(ledger.read(book.path)) == 0
    for step in range(2_000):
        book.step(step, 0, step, [shard(0, step)])
        assert len(ledger.read(book.path, step)) == 1
    book.flush()
    assert len(ledger.read(book.path)) == 2_000
    book.close()
    assert book.path.stat().st_size == len(ledger.MAGIC) + 2_000 * ledger.RECORD.itemsize


def test_a_step_that_a_kill_left_half_recorded_is_as_if_it_had_not_begun(tmp_path: Path) -> None:
    """The records of a step are filled from the last to the first, each up to its digest."""
    path = append(tmp_path, 0, 1, 2, 3)
    data = bytearray(path.read_bytes())
    third = len(ledger.MAGIC) + 2 * ledger.RECORD.itemsize
    data[third + 32 : third + ledger.RECORD.itemsize] = bytes(16)
    path.write_bytes(data + bytes(4096))
    assert ledger.read(path)["number"].tolist() == [0, 1]
    book = ledger.Ledger(tmp_path, 0, 0)
    book.step(7, 0, 7, [shard(0, 7)])
    assert ledger.read(path)["number"].tolist() == [0, 1, 7]
    book.close()


def fill(book: ledger.Ledger, records: int) -> None:
    for step in range(records):
        book.step(step, 0, step, [shard(0, step)])


def test_a_full_disk_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the system refuses the room in the same place."""
    book = ledger.Ledger(tmp_path, 0, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ledger.MAX_RESERVED, before[1]))
    try:
        with pytest.raises(RecordsError, match=r"rank-0-from-0\.bin cannot be written: .*Make room"):
            fill(book, ledger.MAX_RESERVED // ledger.RECORD.itemsize)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    book.close()
    kept = len(ledger.read(book.path))
    assert kept > ledger.MIN_RESERVED // ledger.RECORD.itemsize
    assert book.path.stat().st_size == len(ledger.MAGIC) + kept * ledger.RECORD.itemsize


def test_a_ledger_is_named_by_whose_it_is(tmp_path: Path) -> None:
    for name in ("rank-10-from-2.bin", "rank-9-from-11.bin", "rank-9-from-2.bin", "rank-3.bin", "rank-x.bin"):
        (tmp_path / ledger.FOLDER).mkdir(exist_ok=True)
        (tmp_path / ledger.FOLDER / name).touch()
    assert list(ledger.paths(tmp_path)) == [(3, 0), (9, 2), (9, 11), (10, 2)]
    assert str(ledger.Origin(3, 0)) == "rank 3"
    assert str(ledger.Origin(3, 4)) == "rank 3 (of generation 4)"


@pytest.mark.parametrize("torn", [1, 47, 48 + 3])
def test_a_torn_tail_is_dropped_and_appending_goes_on(tmp_path: Path, torn: int) -> None:
    path = append(tmp_path, 0, 1, 2)
    path.write_bytes(path.read_bytes()[:-torn])
    left = [0, 1] if torn < ledger.RECORD.itemsize else [0]
    assert ledger.read(path)["number"].tolist() == left
    append(tmp_path, 5, 6, generation=1)
    assert ledger.read(path)["number"].tolist() == [*left, 5, 6]
    assert ledger.read(path, start=len(left))["generation"].tolist() == [1, 1]
    assert ledger.capacity(path) == len(left) + 2


def test_a_file_that_was_killed_in_its_first_bytes_is_begun_again(tmp_path: Path) -> None:
    path = append(tmp_path, 0)
    path.write_bytes(ledger.MAGIC[:5])
    assert len(ledger.read(path)) == 0
    append(tmp_path, 4)
    assert ledger.read(path)["number"].tolist() == [4]


def test_another_file_is_no_ledger(tmp_path: Path) -> None:
    path = append(tmp_path, 0)
    path.write_bytes(b"something else entirely")
    with pytest.raises(InputError, match="is no ledger"):
        ledger.read(path)
    with pytest.raises(InputError, match="is no ledger"):
        append(tmp_path, 1)
    assert path.read_bytes() == b"something else entirely"


def test_whoever_is_to_join_on_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    ledger.check_room(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ledger.MIN_RESERVED // 2, before[1]))
    try:
        with pytest.raises(RecordsError, match=r"start again: no checkpoint was saved\.$"):
            ledger.check_room(tmp_path)
        (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
        with pytest.raises(RecordsError, match=r"resumed from its last checkpoint\.$"):
            ledger.check_room(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / ledger.FOLDER).iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ledger.FOLDER).write_text("in the way")
    with pytest.raises(RecordsError, match=r"ledger.*rank-0-from-0\.bin cannot be written"):
        ledger.Ledger(tmp_path, 0, 0)


def test_only_records_that_led_somewhere_belong(tmp_path: Path) -> None:
    """Generation 0 got to step 6, 1 resumed at 4 and got to 8, 2 resumed at 2."""
    append(tmp_path, *range(6), generation=0)
    append(tmp_path, *range(4, 8), generation=1)
    records = ledger.read(append(tmp_path, *range(2, 5), generation=2))
    kept = records[ledger.belonging(records, [0, 2], [0, 2])]
    assert list(zip(kept["generation"].tolist(), kept["number"].tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (2, 2),
        (2, 3),
        (2, 4),
    ]


def served(shards: int, steps: int, workers: int, generation: int = 0) -> ledger.Records:
    """Give the records of all workers, rank by rank, as they lie on the disk."""
    rows = [
        (generation, 0, step, step, index, 1, (step, index))
        for rank in range(workers)
        for step in range(steps)
        for index in owned_shards(rank, workers, shards)
    ]
    return np.array(rows, dtype=ledger.RECORD)


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_the_chain_does_not_depend_on_the_workers_nor_on_where_it_was_cut(
    shards: int, steps: int, data: st.DataObject
) -> None:
    workers = data.draw(st.integers(1, shards))
    cut = data.draw(st.integers(0, steps))
    whole = ledger.chain(FIRST_LINK, served(shards, steps, 1), shards, range(steps))
    records = served(shards, steps, workers, generation=4)
    link = ledger.chain(FIRST_LINK, records, shards, range(cut))
    assert link is not None
    assert ledger.chain(link, records, shards, range(cut, steps)) == whole


def test_the_chain_sees_a_changed_digest_and_refuses_gaps() -> None:
    records = served(2, 5, 2)
    whole = ledger.chain(FIRST_LINK, records, 2, range(5))
    changed = records.copy()
    changed["digest"][3, 1] ^= np.uint64(1)
    assert ledger.chain(FIRST_LINK, changed, 2, range(5)) not in (whole, None)
    assert ledger.chain(FIRST_LINK, records[1:], 2, range(5)) is None
    assert ledger.chain(FIRST_LINK, np.concatenate([records, records[:1]]), 2, range(5)) is None

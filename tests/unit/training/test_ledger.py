"""The ledger: what was appended is read back, a torn tail is dropped, and the chain sees every change."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.shards import owned_shards
from paceline.errors import InputError
from paceline.training import ledger
from paceline.training.receipt import FIRST_LINK


@dataclass(frozen=True)
class Shard:
    index: int
    samples: Any


def shard(index: int, *ids: int) -> Shard:
    return Shard(index, np.array(ids, dtype=np.int64))


def append(folder: Path, *steps: int, rank: int = 0, generation: int = 0, shards: int = 1) -> Path:
    book = ledger.Ledger(folder, rank, generation)
    for step in steps:
        book.step(step, 0, step, [shard(index, step, 10 * step + index) for index in range(shards)])
    book.close()
    return book.path


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    book = ledger.Ledger(tmp_path, 3, 7)
    book.step(40, 1, 17, [shard(2, 5, 3, 9), shard(3)])
    book.close()
    book.close()
    first, second = ledger.read(ledger.paths(tmp_path)[3])
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


def test_records_are_held_back_and_flushed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = ledger.Ledger(tmp_path, 0, 0)
    book.step(0, 0, 0, [shard(0, 1)])
    assert ledger.count(book.path) == 0
    monkeypatch.setattr(ledger, "FLUSH_S", -1.0)
    book.step(1, 0, 1, [shard(0, 2)])
    assert ledger.count(book.path) == 2
    book.close()


@pytest.mark.parametrize("torn", [1, 47, 48 + 3])
def test_a_torn_tail_is_dropped_and_appending_goes_on(tmp_path: Path, torn: int) -> None:
    path = append(tmp_path, 0, 1, 2)
    path.write_bytes(path.read_bytes()[:-torn])
    left = [0, 1] if torn < ledger.RECORD.itemsize else [0]
    assert ledger.read(path)["number"].tolist() == left
    append(tmp_path, 5, 6, generation=1)
    assert ledger.read(path)["number"].tolist() == [*left, 5, 6]
    assert ledger.read(path, start=len(left))["generation"].tolist() == [1, 1]
    assert ledger.count(path) == len(left) + 2


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


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ledger.FOLDER).write_text("in the way")
    with pytest.raises(InputError, match=r"ledger.*rank-0\.bin cannot be written"):
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

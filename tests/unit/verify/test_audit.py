"""The audit: sound ledgers pass, and every way to tamper with one is named with step, shard and rank."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.permutation import EpochPermutation
from paceline.data.shards import owned_shards, shard_bounds
from paceline.errors import InputError
from paceline.records import ledger
from paceline.records.receipt import _RANGES, FIRST_LINK, Point, Receipt, RunSegment
from paceline.verify.receipts import audit as auditing
from paceline.verify.receipts.audit import audit
from paceline.verify.receipts.audit_report import AuditReport

START = RunSegment(
    generation=0,
    step=0,
    epoch=0,
    step_of_epoch=0,
    strategy="ddp",
    workers=2,
    processes=2,
    exactness="bitwise",
    stream=False,
    samples=45,
    shuffle=True,
    order_seed=5,
    precision="fp32",
    compile=False,
    micro_batch=None,
    num_workers=0,
    find_unused_parameters=False,
    sync_batchnorm=False,
    transport_asked="auto",
    max_grad_norm=None,
    horizon=None,
    task=None,
    settings={},
    sources={},
    device="cpu",
    device_name="",
    threads=1,
    versions={},
    paceline_sha256="",
)
BATCH, SHARDS = 10, 4


@dataclass(frozen=True)
class Shard:
    index: int
    samples: Any


def serve(folder: Path, start: RunSegment, until: int, batch: int = BATCH, shards: int = SHARDS) -> None:
    """Write the ledgers of one start, as its workers would."""
    samples = start.samples or 0
    order = EpochPermutation(samples, start.order_seed, start.shuffle)
    books = [ledger.Ledger(folder, rank, start.generation) for rank in range(start.processes)]
    epoch, step = start.epoch, start.step_of_epoch
    for number in range(start.step, until):
        if step * batch >= samples:
            epoch, step = epoch + 1, 0
        ids = order.indices(epoch, step * batch, min((step + 1) * batch, samples))
        for rank, book in enumerate(books):
            owned = owned_shards(rank, len(books), shards)
            parts = [Shard(index, ids[slice(*shard_bounds(index, shards, len(ids)))]) for index in owned]
            book.step(number, epoch, step, parts)
        step += 1
    for book in books:
        book.close()


def close(folder: Path, *starts: RunSegment, steps: int, batch: int = BATCH, shards: int = SHARDS) -> None:
    """Write the receipt of a run that ended well."""
    receipt = Receipt(name="task", seed=5, shards=shards, batch_size=batch, history=starts, finished=True)
    records = np.concatenate([ledger.read(path) for path in ledger.paths(folder).values()])
    led = receipt.segments
    mine = ledger.belonging(records, [one.step for one in led], [one.generation for one in led])
    link = ledger.chain(FIRST_LINK, records[mine], shards, range(steps))
    assert link is not None
    receipt.saved(steps, Point(weights_sha256="2" * 64, chain=link.hex())).write(folder)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two epochs of five steps and two steps more, by two workers."""
    serve(tmp_path, START, 12)
    close(tmp_path, START, steps=12)
    return tmp_path


def rewrite(folder: Path, rank: int, change: Callable[[ledger.Records], ledger.Records]) -> None:
    path = ledger.paths(folder)[ledger.Origin(rank, 0)]
    path.write_bytes(ledger.MAGIC + change(ledger.read(path).copy()).tobytes())


def row(records: ledger.Records, number: int, shard: int) -> int:
    return int(np.flatnonzero((records["number"] == number) & (records["shard"] == shard))[0])


def test_a_sound_run(run: Path) -> None:
    found = audit(run)
    assert found.holds
    assert (found.steps, found.epochs, found.steps_of_next_epoch) == (12, 2, 2)
    assert (found.samples, found.lost, found.repeated) == (2 * 45 + 20, 0, 0)
    assert sum(found.by_rank.values()) == found.samples
    assert set(found.by_rank) == {0, 1}
    assert found.lines()[-1] == "every sample was used exactly once an epoch"


def test_a_record_that_is_missing(run: Path) -> None:
    rewrite(run, 1, lambda records: np.delete(records, row(records, 7, 2)))
    found = audit(run)
    assert (found.lost, found.repeated) == (2, 0)
    missing, chain = found.problems
    assert missing == "step 7, shard 2: on no ledger, so 2 samples are lost; it was for rank 1 to serve"
    assert chain.startswith("the chain of samples cannot be followed up to step 12")
    assert found.samples == 110 - 2


def test_a_record_that_is_there_twice(run: Path) -> None:
    def take_over(records: ledger.Records) -> ledger.Records:
        theirs = ledger.read(ledger.paths(run)[ledger.Origin(1, 0)])
        return np.concatenate([records, theirs[[row(theirs, 3, 3)]]])

    rewrite(run, 0, take_over)
    found = audit(run)
    assert (found.lost, found.repeated, found.served_twice) == (0, 3, 1)
    assert found.problems[0] == "step 3, shard 3: served 2 times, by rank 0 and rank 1"


@pytest.mark.parametrize("field", ["digest", "epoch", "step"])
def test_a_record_that_was_changed(run: Path, field: str) -> None:
    def change(records: ledger.Records) -> ledger.Records:
        records[field][row(records, 4, 1)] += 1
        return records

    rewrite(run, 0, change)
    found = audit(run)
    assert found.served_wrongly == 1
    assert found.lost == shard_bounds(1, SHARDS, 5)[1] - shard_bounds(1, SHARDS, 5)[0]
    assert found.problems[0] == "step 4, shard 1: rank 0 served other samples than the order gives"
    assert "is not the one in the receipt" in found.problems[1]


def test_a_count_that_was_changed(run: Path) -> None:
    def change(records: ledger.Records) -> ledger.Records:
        records["count"][row(records, 0, 0)] = 1
        return records

    rewrite(run, 0, change)
    assert audit(run).problems[0] == "step 0, shard 0: rank 0 served 1 samples where the order gives 2"


def test_a_ledger_that_is_gone(run: Path) -> None:
    ledger.paths(run)[ledger.Origin(1, 0)].unlink()
    found = audit(run)
    assert len(found.problems) == 12 * 2 + 1
    assert found.lines()[-2] == "  and 5 more (--json lists all)"
    assert found.lost + found.samples == 110


def test_a_receipt_with_another_chain(run: Path) -> None:
    receipt = Receipt.read(run)
    receipt.saved(12, Point(weights_sha256="2" * 64, chain="00" * 32)).write(run)
    (problem,) = audit(run).problems
    assert problem.startswith("the chain of samples at step 12 is not the one in the receipt")


def test_steps_taken_again_by_other_workers_count_once(tmp_path: Path) -> None:
    """Killed at step 9, resumed at 6 by three workers; killed at 11, resumed at 10 by one."""
    second = replace(START, generation=1, step=6, epoch=1, step_of_epoch=1, workers=3, processes=3)
    # As a checkpoint after the last step of an epoch has it: behind the epoch's end.
    third = replace(START, generation=2, step=10, epoch=1, step_of_epoch=5, workers=1, processes=1)
    for start, until in ((START, 9), (second, 11), (third, 15)):
        serve(tmp_path, start, until)
    close(tmp_path, START, second, third, steps=14)
    found = audit(tmp_path)
    assert found.holds, found.problems
    assert (found.samples, found.epochs, found.steps_of_next_epoch) == (90 + 40, 2, 4)
    assert (found.superseded, found.beyond) == ((3 + 1) * SHARDS, 1)
    assert found.workers == [(0, 2, "ddp"), (6, 3, "ddp"), (10, 1, "ddp")]


def test_workers_that_come_and_go_a_hundred_times(tmp_path: Path) -> None:
    """Each group leaves a step that it began; the next one takes it again. Files are of whoever opened them."""
    starts = [
        replace(
            START,
            generation=index,
            step=2 * index,
            epoch=2 * index // 5,
            step_of_epoch=2 * index % 5,
            workers=size,
            processes=size,
        )
        for index, size in enumerate([2, 1, 3, 4] * 25)
    ]
    for start in starts:
        serve(tmp_path, start, start.step + 3)
    close(tmp_path, *starts, steps=200)
    found = audit(tmp_path)
    assert found.holds, found.problems
    assert (found.samples, found.lost, found.repeated) == (40 * 45, 0, 0)
    assert (found.superseded, found.beyond) == (99 * SHARDS, 1)
    assert len(found.workers) == 100
    assert set(found.by_rank) == {0, 1, 2, 3}
    assert sum(found.by_rank.values()) == found.samples
    told = found.lines()[1]
    assert told.startswith("workers: 2 (ddp) from step 0, then 1 (ddp) from step 2, then")
    assert told.endswith("then 90 more changes (--json lists all), then 4 (ddp) from step 198")
    assert (tmp_path / "receipt.json").stat().st_size < 20_000

    path = ledger.paths(tmp_path)[ledger.Origin(2, 50)]
    records = ledger.read(path)
    twice = row(records, 101, 2)
    path.write_bytes(ledger.MAGIC + np.concatenate([records, records[[twice]]]).tobytes())
    problem = audit(tmp_path).problems[0]
    assert problem == (
        "step 101, shard 2: served 2 times, by rank 2 (of generation 50) and rank 2 (of generation 50)"
    )


def test_a_shard_that_nobody_served_was_for_the_one_who_had_that_share(tmp_path: Path) -> None:
    start = replace(START, shares=(3, 1))
    serve(tmp_path, start, 4)
    close(tmp_path, start, steps=4)
    for rank, shard in ((1, 2), (1, 3)):
        rewrite(tmp_path, rank, lambda records, shard=shard: np.delete(records, row(records, 1, shard)))
    third, fourth = audit(tmp_path).problems[:2]
    lost = "on no ledger, so 3 samples are lost; it was for rank"
    assert third == f"step 1, shard 2: {lost.replace('3', '2')} 0 to serve"
    assert fourth == f"step 1, shard 3: {lost} 1 to serve"


def test_ledgers_and_receipts_of_before_workers_came_and_went(run: Path) -> None:
    """Names without a generation, every start in full."""
    for origin, path in ledger.paths(run).items():
        path.rename(path.with_name(f"rank-{origin.rank}.bin"))
    document = json.loads((run / "receipt.json").read_text())
    again = {**vars(START), "generation": 1, "step": 12, "epoch": 2, "step_of_epoch": 2}
    del again["shares"], document["history"][0]["shares"]
    document |= {"format": 1, "history": [*document["history"], again]}
    (run / "receipt.json").write_text(json.dumps(document))
    assert audit(run).holds
    assert Receipt.read(run).history == (START, RunSegment(**again))


def test_what_the_receipt_does_not_know_is_no_success(tmp_path: Path) -> None:
    late = replace(START, step=3, step_of_epoch=3)
    serve(tmp_path, late, 9)
    receipt = Receipt(name="task", seed=5, shards=SHARDS, batch_size=BATCH, history=(late,))
    receipt.saved(9, Point(weights_sha256="2" * 64, chain=None)).write(tmp_path)
    found = audit(tmp_path)
    assert found.problems[0] == "steps 0 to 2 are in no start that the receipt knows: it begins at step 3"
    assert found.lost == 0


def test_nothing_to_audit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no receipt\.json in"):
        audit(tmp_path)
    Receipt(name="task", seed=5, shards=SHARDS, batch_size=BATCH, history=(START,)).write(tmp_path)
    with pytest.raises(InputError, match="has no checkpoint yet"):
        audit(tmp_path)


LARGE = (10**9, 10**12, 2**63, 10**30)


@pytest.mark.parametrize("name", ["seed", "shards", "batch_size", "steps", *sorted(_RANGES)])
def test_a_receipt_with_a_large_number_is_refused_or_told_of(run: Path, name: str) -> None:
    """In one line and little time and memory, whatever the number."""
    sound = json.loads((run / "receipt.json").read_text())
    sound["history"][0] |= {"micro_batch": 1, "horizon": 1}
    sound |= {"micro_batch": 1, "horizon": 1}
    for number in LARGE:
        document = json.loads(json.dumps(sound))
        if name == "steps":
            document["checkpoints"][str(number)] = document["checkpoints"]["12"]
        if name in document:
            document[name] = number
        if name in document["history"][0]:
            document["history"][0][name] = number
        (run / "receipt.json").write_text(json.dumps(document))
        refused, problems = "", ["none"]
        try:
            problems = audit(run).problems
        except InputError as error:
            refused = str(error)
        assert len(problems) <= 60
        assert "\n" not in refused
        words = {"steps": "the step of a checkpoint"}.get(name, name)
        if refused:
            assert f"{words} is " in refused
            assert ", but must be at most " in refused
        else:
            assert number < 2**63 or name == "horizon"
            assert problems or name in ("seed", "threads", "micro_batch", "horizon")


def test_many_steps_that_are_on_no_ledger_are_one_line(run: Path) -> None:
    receipt = Receipt.read(run)
    receipt.saved(10**9, Point(weights_sha256="2" * 64, chain="00" * 32)).write(run)
    found = audit(run)
    assert found.problems[0] == (
        f"steps 12 to 999999999: on no ledger, so {10**9 // 5 * 45 - 110} samples are lost"
    )
    assert found.lost == 10**9 // 5 * 45 - 110
    assert (found.samples, found.epochs, found.steps_of_next_epoch) == (110, 10**9 // 5, 0)
    assert len(found.problems) == 2


@pytest.mark.parametrize("key", [" 12", "+12", "1_2", "012", "١٢", "12.0", "nan", "", "-12", "0", "9" * 5000])
def test_a_step_is_written_in_plain_digits(run: Path, key: str) -> None:
    document = json.loads((run / "receipt.json").read_text())
    document["checkpoints"] = {key: document["checkpoints"]["12"]}
    (run / "receipt.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"receipt\.json is not a receipt \(the step .* of a checkpoint is"):
        audit(run)


def test_shares_that_are_not_those_of_the_shards(run: Path) -> None:
    document = json.loads((run / "receipt.json").read_text())
    document["history"][0]["shares"] = document["shares"] = [1, 2]
    (run / "receipt.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"history: shares is \(1, 2\), which do not make up 4 shards"):
        audit(run)


def test_a_ledger_that_was_made_longer_without_end(run: Path) -> None:
    """A file with a hole takes no room on the disk, and would take all of the memory."""
    path = ledger.paths(run)[ledger.Origin(1, 0)]
    end = path.stat().st_size
    os.truncate(path, 2**20)
    assert audit(run).holds, "the room that a killed process left"
    os.truncate(path, 2**40)
    (problem,) = audit(run).problems
    assert problem == (
        f"the ledger of rank 1 goes on for {(2**40 - end) // 48} records after one that was never finished"
    )


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 12),
    shards=st.integers(1, 5),
    steps=st.integers(1, 30),
    workers=st.integers(1, 5),
    shuffle=st.booleans(),
    block=st.sampled_from([1, 20, 2**20]),
)
def test_any_cut_of_any_data(
    samples: int, batch: int, shards: int, steps: int, workers: int, shuffle: bool, block: int
) -> None:
    batch = max(batch, shards)
    start = replace(START, samples=samples, shuffle=shuffle, processes=min(workers, shards))
    found, left = _audited(start, steps, batch, shards, block)
    assert found.holds, found.problems
    whole, rest = divmod(steps, -(-samples // batch))
    assert (found.epochs, found.steps_of_next_epoch) == (whole, rest)
    assert found.samples == whole * samples + min(rest * batch, samples)
    assert left.lost + left.samples == found.samples
    assert not left.holds


def _audited(
    start: RunSegment, steps: int, batch: int, shards: int, block: int
) -> tuple[AuditReport, AuditReport]:
    """Audit a run as it is, and once more without one of its records."""
    before, auditing.BLOCK_SAMPLES = auditing.BLOCK_SAMPLES, block
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            serve(folder, start, steps, batch, shards)
            close(folder, start, steps=steps, batch=batch, shards=shards)
            found = audit(folder)
            rewrite(folder, 0, lambda records: records[:-1])
            return found, audit(folder)
    finally:
        auditing.BLOCK_SAMPLES = before


def test_a_million_samples(tmp_path: Path) -> None:
    start = replace(START, samples=10**6, processes=1)
    serve(tmp_path, start, 10**6 // 500, batch=500)
    close(tmp_path, start, steps=10**6 // 500, batch=500)
    found = audit(tmp_path)
    assert found.holds
    assert (found.epochs, found.samples) == (1, 10**6)


class TestStreams:
    """Only the stream knew where an epoch ended; the ledger says how far it was read."""

    START = replace(START, stream=True, samples=23, shuffle=False)

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        """Two epochs of 23 items in batches of 10 and one step more."""
        serve(tmp_path, self.START, 7)
        close(tmp_path, self.START, steps=7)
        return tmp_path

    def test_a_sound_one(self, run: Path) -> None:
        found = audit(run)
        assert found.holds, found.problems
        assert (found.samples, found.epochs, found.steps_of_next_epoch) == (56, 2, 1)
        assert "no ledger can tell" in found.lines()[-2]
        assert found.lines()[-1] == "every position of the stream was used exactly once an epoch"

    def test_resumed_within_an_epoch_and_at_its_end(self, tmp_path: Path) -> None:
        second = replace(self.START, generation=1, step=1, step_of_epoch=1, processes=3)
        third = replace(self.START, generation=2, step=3, step_of_epoch=3, processes=1)
        for start, until in ((self.START, 2), (second, 4), (third, 7)):
            serve(tmp_path, start, until)
        close(tmp_path, self.START, second, third, steps=7)
        found = audit(tmp_path)
        assert found.holds, found.problems
        assert found.samples == 56

    def test_a_missing_record(self, run: Path) -> None:
        rewrite(run, 0, lambda records: np.delete(records, row(records, 4, 0)))
        found = audit(run)
        assert found.lost == 2
        assert found.problems[0].startswith("step 4, shard 0: on no ledger")

    def test_a_short_step_that_is_not_the_last_of_its_epoch(self, run: Path) -> None:
        def shorten(records: ledger.Records) -> ledger.Records:
            records["count"][row(records, 1, 3)] = 2
            return records

        rewrite(run, 1, shorten)
        assert audit(run).problems[0] == "step 1, shard 3: rank 1 served 2 samples where the order gives 3"

    def test_many_steps_that_are_on_no_ledger(self, run: Path) -> None:
        receipt = Receipt.read(run)
        receipt.saved(10**9, Point(weights_sha256="2" * 64, chain=None)).write(run)
        found = audit(run)
        assert found.problems[0].startswith("steps 7 to 999999999: on no ledger")
        assert found.samples == 56

    def test_an_epoch_that_begins_in_the_middle(self, run: Path) -> None:
        for rank in (0, 1):

            def skip(records: ledger.Records) -> ledger.Records:
                records["step"][records["epoch"] == 1] += 1
                return records

            rewrite(run, rank, skip)
        assert audit(run).problems[0].startswith("step 3: epoch 1 begins at its step 1")

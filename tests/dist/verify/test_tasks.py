"""Sound tasks pass, and each broken one is named with its cause."""

from __future__ import annotations

from functools import cache

import pytest

from paceline.errors import InputError
from paceline.training.spec import TrainSpec
from paceline.verify.proof.check import verify
from paceline.verify.proof.request import VerifyRequest
from paceline.verify.proof.task_report import TaskReport


@cache
def check(
    task: str, *, workers: tuple[int, ...] = (2,), strategies: tuple[str, ...] = ("ddp",), steps: int = 5
) -> TaskReport:
    """Verify a task; only where the hash seed matters is it worth the seconds that a fresh interpreter takes."""
    spec = TrainSpec(task=f"tests.dist.verify.broken:{task}", name=task, steps=steps)
    return verify(
        VerifyRequest(
            spec=spec,
            strategies=strategies,
            workers=workers,
            # What holds for more shards than workers, and across a resume, is seen in test_shards_and_resumes.py.
            shards=max(workers),
            resume=False,
            threads=1,
            more={"device": "cpu"},
            hash_seed=task in ("Sound", "SetOrder"),
        )
    )


def test_a_sound_task_is_the_same_everywhere() -> None:
    report = check("Sound", workers=(1, 2, 4), strategies=("ddp", "dp", "single"), steps=8)
    assert report.holds
    assert not report.findings
    assert not report.unchecked
    found = {(row.strategy, row.workers): row.found for row in report.rows}
    bitwise = [("single", 1), *((name, workers) for name in ("ddp", "dp") for workers in (1, 2, 4))]
    assert found == dict.fromkeys(bitwise, "bitwise") | {
        ("single", 2): "skipped",
        ("single", 4): "skipped",
    }
    assert all((row.lost, row.repeated) == (0, 0) for row in report.rows)


@pytest.mark.parametrize(
    ("task", "probe", "words"),
    [
        ("UnseededWeights", "initial_weights", "differ from process to process"),
        ("SeedOfRank", "seed_of_rank", "1000 on rank 0 and 1001 on rank 1"),
        ("HiddenBuffer", "hidden_state", "1.centre"),
        ("SometimesUnused", "unused", "seldom.weight"),
        ("DataOfRank", "data_of_rank", "other values on rank 1"),
        ("LengthOfRank", "data_of_rank", "rank 1 has 21"),
        ("CountingItems", "unstable_items", "read twice"),
        ("ModelOfRank", "reads_rank", "in module 1"),
        ("ScheduleInLoss", "schedule", "0.05 to 0.045"),
        ("UnseededNoise", "unseeded", "output of module 1"),
    ],
)
def test_a_broken_task_diverges_and_its_cause_is_named(task: str, probe: str, words: str) -> None:
    report = check(task, steps=4)
    assert not report.holds
    assert report.rows[0].found in ("diverged", "failed", "refused")
    first = next(finding for finding in report.findings if not finding.harmless)
    assert first.probe == probe, report.findings
    assert words in f"{first.cause} {first.evidence}"
    assert first.remedy


def test_a_batch_that_is_changed_in_place_is_a_copy() -> None:
    report = check("ChangesItsBatch", steps=12)
    assert report.holds
    assert [(one.probe, one.harmless) for one in report.findings] == [("changed_in_place", True)]


def test_initial_weights_are_told_apart_by_name_and_size() -> None:
    row = check("UnseededWeights", steps=4).rows[0]
    assert (row.found, row.step) == ("diverged", 0)
    assert row.first.startswith("step 0, rank 0: starting weight 0.bias, by ")


def test_a_buffer_without_a_rule_is_named_before_anything_is_compared() -> None:
    with pytest.raises(InputError, match=r"buffer 1\.centre .* def buffers\(self\)"):
        check("OwnBuffer")


@pytest.mark.parametrize(
    ("task", "probe", "words"),
    [
        ("MeanOfMeans", "mean_of_means", "weigh 1, but one and two of them weigh 2"),
        ("AveragedTwice", "mean_of_means", "weigh 1, but one and two of them weigh 2"),
        ("SetOrder", "hash_order", "PYTHONHASHSEED"),
        ("ClippedInHook", "clipped_early", "2^20 times"),
        ("ClippedInLoss", "clipped_early", "loss() itself changes the .grad"),
    ],
)
def test_a_fault_that_no_number_of_workers_shows_is_named_too(task: str, probe: str, words: str) -> None:
    report = check(task, steps=2)
    assert not report.holds
    assert [finding.probe for finding in report.findings if not finding.harmless] == [probe], report.findings
    assert words in report.findings[0].evidence


@pytest.mark.parametrize(
    ("task", "probe", "words"),
    [
        ("WeightsOfRank", "initial_weights", "depends on the rank"),
        ("SameOrder", "same_order", "the same in every epoch"),
        ("NoKernel", "no_kernel", "put_"),
    ],
)
def test_what_does_no_harm_here_is_told_and_fails_nothing(task: str, probe: str, words: str) -> None:
    report = check(task, steps=8)
    assert report.holds
    (finding,) = report.findings
    assert finding.probe == probe
    assert words in finding.cause

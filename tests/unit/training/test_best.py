"""`run.save(best=...)` keeps the best checkpoint by a metric, in a body, in `after_epoch` and between calls of `run.steps`."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import Run
from paceline.checkpoint.best import best_of
from paceline.errors import InputError
from tests.unit.training.own_runs import data, losses, opened, prepared, resumed

VALUES = [0.2, 0.9, 0.9, 0.5, float("nan"), 0.7]


def steps_of(run: Run, count: int) -> None:
    """Take steps of three a call, and score each in its body."""
    model, _ = prepared(run)
    for step in run.steps(data(), batch_size=8, steps=count):
        for batch in step:
            step.backward(losses(model, batch))
        step.apply()
        run.save(best=VALUES[step.number], mode="max")
    run._engine.calls.finish()


def kept(out: Path) -> tuple[list[str], list[int]]:
    """Return the checkpoints that are there, and the best."""
    return sorted(path.name for path in (out / "checkpoints").iterdir()), [one.step for one in best_of(out)]


def test_the_best_is_kept_and_resumed_from_where_the_run_stood(tmp_path: Path) -> None:
    with opened(out=tmp_path, keep=1) as run:
        steps_of(run, 4)
    assert kept(tmp_path) == (["step-2", "step-4"], [2])
    with resumed(tmp_path, keep=1) as run:
        steps_of(run, 6)
    assert kept(tmp_path) == (["step-2", "step-6"], [2])


def test_several_of_the_best_are_kept(tmp_path: Path) -> None:
    with opened(out=tmp_path, keep=1, keep_best=3) as run:
        steps_of(run, 6)
    assert kept(tmp_path) == (["step-2", "step-3", "step-6"], [2, 3, 6])  # 1 and 4 were the best once


def test_between_calls_and_after_an_epoch(tmp_path: Path) -> None:
    with opened(out=tmp_path, keep=1) as run:
        model, _ = prepared(run)
        for epoch in range(3):
            for step in run.steps(
                data(16),
                batch_size=8,
                epochs=1,
                after_epoch=lambda epoch: run.save(best=1.0 / epoch, mode="min"),
            ):
                for batch in step:
                    step.backward(losses(model, batch))
                step.apply()
            run.save(best=[0.8, 0.1, 0.4][epoch], mode="min")
        run._engine.calls.finish()
    assert kept(tmp_path) == (["step-4", "step-6"], [4])


def test_what_is_ambiguous_is_refused(tmp_path: Path) -> None:
    with opened(out=tmp_path) as run:
        model, _ = prepared(run)
        with pytest.raises(InputError, match=r'does not say what is best\. Say which is better: mode="max"'):
            run.save(best=0.5)
        with pytest.raises(InputError, match="mode='most' is not one"):
            run.save(best=0.5, mode="most")  # type: ignore[arg-type]
        with pytest.raises(InputError, match="is no number"):
            run.save(best={"accuracy": 0.5}, mode="max")  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"^best=10+ is no number"):
            run.save(best=10**400, mode="max")
        steps = run.steps(data(), batch_size=8, steps=1)
        step = next(steps)
        for batch in step:
            step.backward(losses(model, batch))
        with pytest.raises(InputError, match=r"called in the middle of step 0|before step\.apply"):
            run.save(best=0.5, mode="max")

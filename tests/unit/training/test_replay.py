"""A loop that goes through what it did before: it can ask whether it does, and takes no weights for those of then."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Mean, Run
from paceline.errors import InputError
from tests.unit.training.own_runs import data, losses, opened, prepared, resumed

REFUSED = r"after call 1 of run\.steps.*weights are those of step 6.*`if not run\.replaying:`"
Behind = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


def measured(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Mean]:
    found = losses(model, batch)
    return {"error": Mean(found.sum(), len(found))}


def go(run: Run, epochs: int, behind: Behind, *, saves: bool = False) -> list[tuple[int, bool, Any]]:
    """Train an epoch a call, measure, and do something; return what it gave, and whether it had been done before."""
    told: list[tuple[int, bool, Any]] = [(-2, run.replaying, None)]
    model, optimizer = prepared(run)
    told.append((-1, run.replaying, None))
    for epoch in range(epochs):
        for step in run.steps(data(), batch_size=8, epochs=1):
            assert not run.replaying
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
        run.evaluate(data(8), measured)
        if saves:
            told.append((epoch, run.replaying, None))
            run.save()
        run.weights_sha256()
        told.append((epoch, run.replaying, behind(model, optimizer, epoch)))
    run._engine.calls.finish()
    return told


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    del model, optimizer, epoch


def test_a_loop_knows_what_it_did_before(tmp_path: Path) -> None:
    with opened(out=tmp_path) as run:
        assert not any(before for _, before, _ in go(run, 2, nothing))
    with resumed(tmp_path) as run:
        told = go(run, 4, nothing)
    # The last checkpoint is written in the second call, and what stands behind that is done once more with its very weights.
    assert [(epoch, before) for epoch, before, _ in told] == [
        *((-2, True), (-1, True)),
        *((0, True), (1, False), (2, False), (3, False)),
    ]


def test_what_stands_before_a_save_was_done_before(tmp_path: Path) -> None:
    def state(model: nn.Module, *_: Any) -> Any:
        return None if run.replaying else copy.deepcopy(model.state_dict())

    with opened(out=tmp_path) as run:
        go(run, 1, state, saves=True)
    with resumed(tmp_path) as run:
        told = go(run, 2, state, saves=True)
    assert [before for _, before, _ in told] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    "behind",
    [
        lambda model, *_: model.state_dict(),
        lambda model, *_: torch.save(model, io.BytesIO()),
        lambda model, *_: copy.deepcopy(model).state_dict(),
        lambda _, optimizer, __: optimizer.state_dict(),
    ],
    ids=["state", "model", "copy", "optimizer"],
)
def test_weights_of_then_are_refused(behind: Behind, tmp_path: Path) -> None:
    with opened(out=tmp_path) as run:
        go(run, 2, behind)
    with resumed(tmp_path) as run, pytest.raises(InputError, match=REFUSED) as refused:
        go(run, 4, behind)
    assert "\n" not in str(refused.value)


def test_a_loop_that_asks_saves_its_best_once(tmp_path: Path) -> None:
    def kept(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> Any:
        if run.replaying:
            return None
        return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    with opened() as run:
        whole = go(run, 4, kept)
    with opened(out=tmp_path) as run:
        go(run, 2, kept)
    with resumed(tmp_path) as run:
        rest = go(run, 4, kept)
    assert [state for *_, state in rest[:3]] == [None] * 3
    for (*_, mine), (*_, theirs) in zip(rest[3:], whole[3:], strict=True):
        assert all(torch.equal(mine[0][name], theirs[0][name]) for name in theirs[0])


def test_a_copy_that_was_made_on_the_way_is_free_later(tmp_path: Path) -> None:
    copies: list[nn.Module] = []
    with opened(out=tmp_path) as run:
        go(run, 2, nothing)
    with resumed(tmp_path) as run:
        go(run, 3, lambda model, *_: copies.append(copy.deepcopy(model)))
    for one in copies:
        written = io.BytesIO()
        torch.save(one, written)
        written.seek(0)
        again = torch.load(written, weights_only=False)
        assert torch.equal(again.state_dict()["weight"], one.state_dict()["weight"])


class Average:
    """A registered state that reads the model whenever it is asked for its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"sum": float(sum(one.sum() for one in self.model.state_dict().values()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def test_what_the_run_itself_reads_is_not_the_loops(tmp_path: Path) -> None:
    """Measurements, hashes, saves and registered states that stand behind calls that are over, some of them new."""

    def train(epochs: int, *, more: bool) -> str:
        model, _ = prepared(run, momentum=0.9)
        run.register("average", Average(model))
        for _ in range(epochs):
            for step in run.steps(data(), batch_size=8, epochs=1):
                for batch in step:
                    step.backward(losses(model, batch))
                step.apply()
            for _ in range(1 + more):
                run.evaluate(data(8), measured)
                run.weights_sha256()
            run.save()
        run._engine.calls.finish()
        return run.weights_sha256()

    with opened() as run:
        model, _ = prepared(run, momentum=0.9)
        for step in run.steps(data(), batch_size=8, epochs=4):
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
        wanted = run.weights_sha256()
    for more in (False, True):
        with opened(out=tmp_path / str(more)) as run:
            train(2, more=False)
        with resumed(tmp_path / str(more)) as run:
            assert train(4, more=more) == wanted

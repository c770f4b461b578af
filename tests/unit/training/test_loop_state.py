"""State of the loop's own is saved with the run, comes back with it, and is refused where it would be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline import Run
from paceline.errors import CheckpointError, InputError
from tests.unit.training.own_runs import data, losses, opened, prepared, resumed


class Best:
    def __init__(self) -> None:
        self.loss, self.at = float("inf"), np.int64(-1)

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.at = state["loss"], state["at"]


def averaged(
    run: Run, steps: int, *, late: bool = False
) -> tuple[dict[str, Tensor], float, int, list[float]]:
    """Keep a moving average, the best loss and a history beside the weights; `late` registers before run.prepare."""
    best, history = Best(), {"losses": []}  # type: ignore[var-annotated]
    if late:
        run.register("best", best)
    model, _ = prepared(run)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    assert run.register("average", average) is average
    if not late:
        run.register("best", best)
    run.register("history", history)
    for step in run.steps(data(), batch_size=8, steps=steps):
        for batch in step:
            step.backward(losses(model, batch))
        result = step.apply()
        average.update_parameters(model)
        history["losses"].append(result.loss)
        if result.loss < best.loss:
            best.loss, best.at = result.loss, np.int64(step.number)
    return average.state_dict(), best.loss, int(best.at), history["losses"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("save", [{}, {"save_every": "1", "save_async": True}])
def test_it_comes_back_with_the_run(late: bool, save: dict[str, Any], tmp_path: Path) -> None:
    with opened() as run:
        wanted = averaged(run, 6)
    with opened(out=tmp_path, **save) as run:
        averaged(run, 3)
    with resumed(tmp_path) as run:
        found = averaged(run, 6, late=late)
    assert found[1:] == wanted[1:]
    assert all(torch.equal(found[0][name], wanted[0][name]) for name in wanted[0])


def plain_loop(run: Run, **states: Any) -> None:
    prepared(run)
    for name, value in states.items():
        run.register(name, value)
    for step in run.steps(data(), batch_size=8, steps=run._engine.state.position.number + 1):
        for batch in step:
            step.backward(losses(run._engine.state.replica.model, batch))
        step.apply()


def test_what_a_checkpoint_holds_is_not_lost_without_a_word(tmp_path: Path) -> None:
    with opened(out=tmp_path) as run:
        plain_loop(run, best=Best())
    with (
        resumed(tmp_path) as run,
        pytest.raises(InputError, match=r"holds the state 'best'.*nobody has registered"),
    ):
        plain_loop(run)
    with resumed(tmp_path) as run:
        plain_loop(run, best=Best(), more={})  # more begins as it is


@pytest.mark.parametrize("states", [{}, {"score": {"best": 1.0}}])
def test_a_resumed_loop_that_has_registered_nothing_is_told_so(
    states: dict[str, Any], tmp_path: Path
) -> None:
    with opened(out=tmp_path) as run:
        plain_loop(run, **states)
    heard: list[Any] = []
    with resumed(tmp_path) as run:
        run._engine.state.emit = heard.append
        plain_loop(run, **states)
    told = [one for one in heard if "run.register" in getattr(one, "text", "")]
    assert len(told) == (0 if states else 1)


def test_what_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    for wrong, words in ((object(), "no state_dict"), ({1, 2}, "a set, which has no state_dict")):
        with opened() as run, pytest.raises(InputError, match=words):
            run.register("it", wrong)
    with opened(out=tmp_path / "run") as run, pytest.raises(CheckpointError, match=r"'it'.model.*Linear"):
        plain_loop(run, it={"model": torch.nn.Linear(1, 1)})
    with opened() as run:
        run.register("it", {})
        with pytest.raises(InputError, match="called before"):
            run.register("it", {})
        plain_loop(run)
        with pytest.raises(InputError, match=r"came after run\.steps"):
            run.register("late", {})


def held(run: Run, steps: int) -> dict[str, Any]:
    """Go on with what was registered under names of the loop's own."""
    model, _ = prepared(run)
    average, squares, log = torch.zeros(4), np.zeros(2), [0.0]
    nested = {"deep": (torch.zeros(2), [torch.ones(())])}
    run.register(
        "held", {"average": average, "squares": squares, "log": log, "nested": nested, "live": dict(nested)}
    )
    for step in run.steps(data(), batch_size=8, steps=steps):
        for batch in step:
            step.backward(losses(model, batch))
        loss = step.apply().loss
        average.mul_(0.5).add_(loss)
        squares += loss**2
        log.append(loss)
        nested["deep"][0].add_(loss)
        nested["deep"][1][0].mul_(loss)
    return {"average": average, "squares": squares, "log": log, **nested}


def replaced(run: Run, steps: int) -> dict[str, Any]:
    """Put another object into the dict each time, and begin again with the first one now and then."""
    model, _ = prepared(run)
    nothing, none = torch.zeros(4), np.zeros(2)
    state = run.register("sums", {"sum": nothing, "array": none})
    for step in run.steps(data(), batch_size=8, steps=steps):
        for batch in step:
            step.backward(losses(model, batch))
        loss = step.apply().loss
        if step.number % 4 == 3:
            state["sum"], state["array"] = nothing, none
        else:
            state["sum"], state["array"] = state["sum"] + loss, state["array"] + loss
    return {**state, "nothing": nothing, "none": none}


@pytest.mark.parametrize("loop", [held, replaced])
@pytest.mark.parametrize("at", [2, 4, 5])
def test_what_the_loop_holds_of_a_dict_is_what_was_saved(loop: Any, at: int, tmp_path: Path) -> None:
    with opened() as run:
        wanted = loop(run, 7)
    with opened(out=tmp_path) as run:
        loop(run, at)
    with resumed(tmp_path) as run:
        found = loop(run, 7)
    assert str(found) == str(wanted)

"""Several calls of `run.steps` in one run: each goes through all of its data, and a resumed run skips what was done."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline import Mean, Run
from paceline.errors import InputError, NonFiniteLossError
from paceline.training.user_loop.call_history import Outcomes
from paceline.verify.receipts.audit import audit
from tests.checkpoints import Checkpoints
from tests.unit.training.own_runs import data, losses, opened, prepared, resumed


def go(run: Run, plan: list[tuple[int, dict[str, Any]]], *, leave: tuple[int, int] | None = None) -> Any:
    """Take steps over data of given sizes, one call for each; `leave` breaks out of a call at a step."""
    model, _ = prepared(run, momentum=0.9)
    seen: list[list[torch.Tensor]] = []
    for call, (samples, ends) in enumerate(plan):
        seen.append([])
        for step in run.steps(data(samples), batch_size=8, **ends):
            for batch in step:
                seen[-1].append(batch[0])
                step.backward(losses(model, batch))
            step.apply()
            if leave == (call, step.number):
                break
        if leave is not None and leave[0] == call:
            break
    run._engine.calls.finish()
    return model.state_dict(), seen, run._engine.state.position


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


PLAN: list[tuple[int, dict[str, Any]]] = [(24, {"steps": 2}), (32, {"epochs": 2}), (32, {"epochs": 1})]


def test_each_call_goes_through_all_of_its_data() -> None:
    with opened() as run:
        _, seen, position = go(run, PLAN)
    assert [sum(len(batch) for batch in call) for call in seen] == [16, 64, 32]
    assert position.number == 2 + 8 + 4
    first, second, third = (
        torch.cat(seen[1][:4]),
        torch.cat(seen[1][4:]),
        torch.cat(seen[2]),
    )
    everything = data(32).tensors[0]
    for epoch in (first, second, third):
        assert torch.equal(epoch.sort(0).values, everything.sort(0).values)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)  # an order of its own for each epoch of the run


@pytest.mark.parametrize("leave", [(0, 0), (0, 1), (1, 2), (1, 6), (1, 9), (2, 11)])
def test_a_run_left_anywhere_resumes_there(leave: tuple[int, int], tmp_path: Path) -> None:
    with opened() as run:
        wanted, _, _ = go(run, PLAN)
    with opened(out=tmp_path) as run:
        _, before, left = go(run, PLAN, leave=leave)
        assert left.number == leave[1] + 1
    (path,) = Checkpoints(tmp_path / "checkpoints").committed()[-1:]
    assert path.name == f"step-{left.number}"
    with resumed(tmp_path) as run:
        found, after, position = go(run, PLAN)
    assert same(found, wanted)
    assert position.number == 14
    assert [
        sum(len(batch) for batch in (*one, *other))
        for one, other in zip((*before, [], [])[:3], after, strict=True)
    ] == [
        16,
        64,
        32,
    ]
    assert audit(tmp_path).holds


def test_another_batch_size_is_refused() -> None:
    with opened() as run:
        go(run, PLAN[:1])
        with pytest.raises(InputError, match="batches of 8 samples, not of 4"):
            next(iter(run.steps(data(), batch_size=4, epochs=1)))


def test_an_exception_saves_nothing(tmp_path: Path) -> None:
    with opened(out=tmp_path) as run:
        model, _ = prepared(run)

        def fail() -> None:
            for step in run.steps(data(), batch_size=8, epochs=1):
                for batch in step:
                    step.backward(losses(model, batch))
                step.apply()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_second_model_is_refused() -> None:
    with opened() as run:
        prepared(run)
        with pytest.raises(InputError, match=r"run.prepare was called before.*by name"):
            prepared(run)


@pytest.mark.parametrize(
    "ends",
    [
        {"epochs": 0},
        {"steps": -1},
        {"steps": 2.0},
        {"epochs": True},
        {"steps": 1, "max_grad_norm": float("nan")},
    ],
)
def test_ends_that_are_none(ends: dict[str, Any]) -> None:
    with opened() as run:
        prepared(run)
        with pytest.raises(InputError, match="must be a"):
            next(iter(run.steps(data(), batch_size=8, **ends)))


def test_numbers_of_numpy_are_numbers() -> None:
    with opened() as run:
        model, _ = prepared(run)
        for ends in ({"steps": np.int64(2)}, {"epochs": np.uint8(1)}):
            taken = 0
            for step in run.steps(data(), batch_size=np.int32(8), **ends):  # type: ignore[arg-type]
                for batch in step:
                    step.backward(losses(model, batch))
                taken += step.apply().size
            assert taken == 8 * (2 if "steps" in ends else 3)
        assert type(run._engine.state.position.number) is int


def test_loading_processes_end_with_what_they_loaded_for() -> None:
    def measure(model: nn.Module, batch: Any) -> dict[str, Mean]:
        return {"loss": Mean(losses(model, batch).sum(), len(batch[0]))}

    with opened(num_workers=1) as run:
        prepared(run)
        for _ in range(3):
            for step in run.steps(data(), batch_size=8, epochs=1):
                step.compute(_loss)
                run.evaluate(data(), measure)
                assert len(multiprocessing.active_children()) <= 1
                if step.number % 3 == 1:
                    break
        assert not multiprocessing.active_children()


def _loss(model: nn.Module, batch: Any) -> Any:
    from paceline import Loss

    return Loss.mean(losses(model, batch))


def freed(steps: int, run: Run) -> torch.Tensor:
    """Train a second layer from step 2 on, frozen by the loop before its first."""
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    model[0].requires_grad_(False)
    for step in run.steps(data(), batch_size=8, steps=steps):
        if step.number == 2:
            model[0].requires_grad_(True)
        for batch in step:
            step.backward(losses(model, batch))
        step.apply()
    return model[0].weight.detach()  # type: ignore[no-any-return]


def test_what_was_freed_before_a_checkpoint_trains_on(tmp_path: Path) -> None:
    with opened(shards=2) as run:
        wanted = freed(6, run)
    with opened(shards=2, out=tmp_path) as run:
        freed(4, run)
    with resumed(tmp_path, shards=2) as run:
        assert torch.equal(freed(6, run), wanted)


@pytest.mark.parametrize(("strategy", "said"), [("local-sgd", True), ("single", False)])
def test_a_run_that_promises_no_bits_says_so_when_it_is_resumed(
    strategy: str, said: bool, tmp_path: Path
) -> None:
    heard: list[str] = []
    for steps in (2, 4):
        with opened(strategy=strategy, out=tmp_path, resume=steps > 2) as run:
            run._engine.state.emit = lambda event: heard.append(getattr(event, "text", ""))  # type: ignore[method-assign]
            model, _ = prepared(run)
            for step in run.steps(data(), batch_size=4, steps=steps):
                for batch in step:
                    step.backward(losses(model, batch))
                step.apply()
        assert any("promises no bits" in one for one in heard) is (said and steps > 2)


def epoch_by_epoch(run: Run, stop: int | None = None) -> Any:
    """Train one call of `run.steps` an epoch, as loops are often ported: a schedule and a score stand between."""
    model, optimizer = prepared(run, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    book = run.register("book", {"measured": 0, "scores": []})
    run.register("schedule", schedule)
    rates = []
    for epoch in range(5):
        for step in run.steps(data(24), batch_size=8, epochs=1):
            rates.append((step.number, optimizer.param_groups[0]["lr"]))
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
            if step.number == stop:
                return None
        score = run.evaluate(data(16), lambda model, batch: {"loss": Mean(losses(model, batch).sum(), 16)})
        book["measured"] += 1
        book["scores"].append(score["loss"])
        schedule.step()
        if epoch == 3 and len(set(book["scores"])) < 4:
            raise AssertionError("an early end that the whole run did not come to")
    return model.state_dict(), book, rates


@pytest.mark.parametrize("stop", [1, 4, 7, 11])
def test_what_stands_between_two_calls_is_not_done_twice_after_a_resume(stop: int, tmp_path: Path) -> None:
    with opened() as run:
        whole, book, rates = epoch_by_epoch(run)
    with opened(out=tmp_path, save_every="1") as run:
        epoch_by_epoch(run, stop)
    with resumed(tmp_path) as run:
        again, told, later = epoch_by_epoch(run)
    assert same(whole, again)
    assert told == book
    assert later == [one for one in rates if one[0] >= stop], "left before that step was saved"


def saving_between(run: Run, kind: str, fail: int | None = None) -> Any:
    """Measure behind each call, save behind the first two, and change weights, rate and states around that."""
    model, optimizer = prepared(run, momentum=0.9)
    book = run.register("book", {"best": math.inf, "calls": 0})
    found: list[Any] = []
    for call in range(5):
        for step in run.steps(data(24), batch_size=8, epochs=1):
            if step.number == fail:
                raise ValueError("the machine is needed elsewhere")
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
        for _ in range(2):
            score = run.evaluate(data(16), lambda made, one: {"loss": Mean(losses(made, one).sum(), 16)})
            found += [score, run.weights_sha256()]
        if kind == "the best":
            if score["loss"] < book["best"]:
                book["best"] = score["loss"]
                if call < 2:
                    run.save()
        else:
            if kind == "twice" and call < 2:
                run.save()
            with torch.no_grad():
                model.weight.mul_(0.9)
            optimizer.param_groups[0]["lr"] *= 0.7
            book["calls"] += 1
            if call < 2:
                run.save()
        with torch.no_grad():
            model.bias.add_(0.1)
        optimizer.param_groups[0]["lr"] *= 0.9
    return model.state_dict(), found, book


@pytest.mark.parametrize("kind", ["once", "twice", "the best"])
@pytest.mark.parametrize("every", [None, "1"])
def test_a_save_behind_an_evaluation_between_two_calls_resumes_there(
    kind: str, every: str | None, tmp_path: Path
) -> None:
    with opened(out=tmp_path / "whole") as run:
        whole, found, book = saving_between(run, kind)
    for fail in (4, 7, 11):  # three steps a call: in call 1, 2 and 3
        with (
            opened(out=tmp_path / "run", resume=fail > 4, save_every=every if fail > 4 else None) as run,
            pytest.raises(ValueError, match="elsewhere"),
        ):
            saving_between(run, kind, fail)
    with resumed(tmp_path / "run") as run:
        again, told, states = saving_between(run, kind)
    assert told == found
    assert states == book
    assert same(whole, again)


def test_outcomes_belong_to_a_call_and_a_place_behind_it() -> None:
    between = Outcomes()
    between.note(0, "run.evaluate", 1)
    between.note(0, "run.save", None)
    between.note(1, "run.weights_sha256", "a")
    resumed = Outcomes()
    resumed.load(between.state())
    assert resumed.holds(0, "run.evaluate")
    assert not resumed.holds(0, "run.weights_sha256")
    assert resumed.next(0, "run.evaluate") == 1
    resumed.note(0, "run.evaluate", 2)  # the save was not asked for again
    assert resumed.state() == [[0, "run.evaluate", 1], [0, "run.evaluate", 2], [1, "run.weights_sha256", "a"]]
    resumed.drop(1)
    assert resumed.state() == [[0, "run.evaluate", 1], [0, "run.evaluate", 2]]
    joined = Outcomes()
    joined.load(between.state())
    assert joined.next(1, "run.weights_sha256") == "a"
    for call, asked in ((0, "run.weights_sha256"), (1, "run.evaluate"), (2, "run.evaluate")):
        with pytest.raises(InputError, match="the others did not call"):
            joined.next(call, asked)


def from_another(run: Run, steps: int) -> Any:
    """Load other weights into a model that was prepared, as when fine-tuning."""
    model, _ = prepared(run, momentum=0.9)
    model.load_state_dict({"weight": torch.full((1, 4), 0.5), "bias": torch.zeros(1)})
    for step in run.steps(data(24), batch_size=8, steps=steps):
        for batch in step:
            step.backward(losses(model, batch))
        step.apply()
    return model.state_dict()


def test_weights_that_a_loop_loads_when_it_begins_do_not_undo_a_resume(tmp_path: Path) -> None:
    with opened() as run:
        whole = from_another(run, 5)
    with opened(out=tmp_path) as run:
        from_another(run, 3)
    with resumed(tmp_path) as run:
        assert same(from_another(run, 5), whole)


def saving_first(run: Run, steps: int | None) -> Any:
    """Save what it begins with: what stands before that run.save() is in the checkpoint, what stands behind it is not."""
    model, optimizer = prepared(run, momentum=0.9)
    book = run.register("book", {"begun": 0})
    model.load_state_dict({"weight": torch.full((1, 4), 0.5), "bias": torch.zeros(1)})
    score = run.evaluate(data(16), lambda made, one: {"loss": Mean(losses(made, one).sum(), 16)})["loss"]
    with torch.no_grad():
        model.weight.mul_(score)
    book["begun"] += 1
    run.save()
    with torch.no_grad():
        model.bias.add_(0.3)
    optimizer.param_groups[0]["lr"] *= 0.5
    book["begun"] += 10
    if steps is None:
        return None
    for step in run.steps(data(24), batch_size=8, steps=steps):
        for batch in step:
            step.backward(losses(model, batch))
        step.apply()
    return model.state_dict(), optimizer.param_groups[0]["lr"], dict(book)


@pytest.mark.parametrize("left", [None, 3])
def test_a_save_before_the_first_call_is_its_place_or_is_gone_by(left: int | None, tmp_path: Path) -> None:
    with opened(out=tmp_path / "whole") as run:
        whole, rate, book = saving_first(run, 5)
    with opened(out=tmp_path / "run") as run:
        saving_first(run, left)
    with resumed(tmp_path / "run") as run:
        again, resumed_rate, told = saving_first(run, 5)
    assert same(again, whole)
    assert (resumed_rate, told) == (rate, book)


def patient(run: Run, fail: int | None = None, *, odd: str = "") -> Any:
    """End when the score, or the rate that follows it, says so; keep the best; leave the first call with break."""
    model, optimizer = prepared(run, momentum=0.9, lr=0.2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    book = run.register("book", {"best": math.inf, "bad": 0, "steps": 0})
    run.register("schedule", schedule)
    large = run.register("large", {"seen": torch.zeros(5000)})
    decided = []
    for call in range(6):
        for step in run.steps(data(24), batch_size=8, epochs=2):
            if step.number == fail:
                raise ValueError("the machine is needed elsewhere")
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
            book["steps"] += 1
            large["seen"] += 1
            if call == 0 and book["steps"] == 2:
                break
        score = run.evaluate(data(16), lambda made, one: {"loss": Mean(losses(made, one).sum(), 16)})["loss"]
        schedule.step(score)
        with torch.no_grad():
            model.weight.mul_(0.9)
        decided.append((score < book["best"], optimizer.param_groups[0]["lr"], book["steps"]))
        if score < book["best"]:
            book.update(best=score, bad=0)
            if not odd or call < 1:
                run.save()
        else:
            book["bad"] += 1
        with torch.no_grad():
            model.bias.add_(0.2)
        if book["bad"] >= 3 or optimizer.param_groups[0]["lr"] < 0.01:
            break
        if odd == "ends" and large["seen"][0] > 7:  # too large to be kept for each call
            return None
    run._engine.calls.finish()
    return model.state_dict(), dict(book), decided


@pytest.mark.parametrize("fail", [3, 8, 14, 15, 20])
@pytest.mark.parametrize("every", [None, "1"])
def test_what_a_loop_decides_between_its_calls_it_decides_again_in_a_resumed_run(
    every: str | None, fail: int, tmp_path: Path
) -> None:
    with opened(out=tmp_path / "whole") as run:
        whole, book, decided = patient(run)
    with (
        opened(out=tmp_path / "run", save_every=every) as run,
        pytest.raises(ValueError, match="elsewhere"),
    ):
        patient(run, fail)
    with resumed(tmp_path / "run") as run:
        again, told, told_decided = patient(run)
    assert told_decided == decided
    assert told == book
    assert same(whole, again)


def test_a_resumed_function_that_goes_by_the_place_it_was_saved_at_is_refused(tmp_path: Path) -> None:
    for name, fail in (("saved", 3), ("in a call", 10)):
        with (
            opened(out=tmp_path / name, save_every="1" if fail > 3 else None) as run,
            pytest.raises(ValueError, match="elsewhere"),
        ):
            patient(run, fail)

    def odd(run: Run) -> None:
        prepared(run, momentum=0.9, lr=0.2)
        for name in ("book", "schedule", "large"):
            run.register(name, {})
        for _ in range(2):
            for step in run.steps(data(24), batch_size=8, epochs=2):
                step.compute(_loss)
        raise AssertionError("trained")

    with (
        resumed(tmp_path / "saved") as run,
        pytest.raises(InputError, match=r"saved by a run\.save\(\) behind call 1.*did not come to it"),
    ):
        odd(run)
    with resumed(tmp_path / "in a call") as run:
        patient(run, odd="ends")
        with pytest.raises(InputError, match=r"saved in call 3 of run\.steps, .* ended behind call 1"):
            run._engine.calls.finish()


def growing(run: Run, leave: tuple[int, int] | None, kind: str) -> Any:
    """Give the optimizer a group between two calls, or before the first, and save behind that, or not."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model, optimizer = run.prepare(model, torch.optim.Adam(model[2].parameters(), lr=0.05))
    for call in range(3):
        if call == (kind != "at once"):
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
            if kind == "saved":
                run.save()
                if (
                    leave is None
                    and run._engine.state.options.resume is False
                    and run._engine.state.options.out is not None
                ):
                    return None
        for step in run.steps(data(24), batch_size=8, epochs=1):
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
            if leave == (call, step.number):
                run._engine.calls.finish()
                return None
    return model.state_dict(), [(group["lr"], len(group["params"])) for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("leave", "kind"),
    [((0, 1), "at once"), ((2, 7), "at once"), ((0, 1), "later"), ((1, 4), "later"), ((2, 7), "later"), (None, "saved")],
)  # fmt: skip
def test_a_group_added_between_two_calls_is_added_again_in_a_resumed_run(
    leave: tuple[int, int] | None, kind: str, tmp_path: Path
) -> None:
    with opened() as run:
        whole, groups = growing(run, None, kind if kind != "saved" else "later")
    with opened(out=tmp_path) as run:
        growing(run, leave, kind)
    with resumed(tmp_path) as run:
        again, regrown = growing(run, None, kind)
    assert same(again, whole)
    assert regrown == groups


def test_an_iterator_with_a_name_is_left_when_it_is_closed() -> None:
    """Until then nothing tells an evaluation behind `break` from one inside the loop, and a newcomer skips the latter."""

    def measure() -> int:
        run.evaluate(data(8), lambda made, batch: {"mean": Mean(made(batch[0]).sum(), len(batch[0]))})
        return [asked for _, asked, _ in run._engine.history.behind.state()].count("run.evaluate")

    with opened() as run:
        model, _ = prepared(run)
        named = run.steps(data(8), batch_size=8, epochs=2)
        for step in named:
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
            break
        assert measure() == 0
        named.close()
        assert measure() == 1
    with pytest.raises(
        InputError, match=r"did not call run\.evaluate where it does.*has a name.*it\.close\(\)"
    ):
        Outcomes().next(0, "run.evaluate")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_step_left_before_it_was_applied_leaves_no_trace_in_a_checkpoint(
    shards: int, tmp_path: Path
) -> None:
    """Batch normalisation has counted its batches, and a resumed run takes the step once more."""

    def train(run: Run, leave: int | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for step in run.steps(data(), batch_size=4, epochs=1):
            for batch in step:
                step.backward(losses(model, batch))
            if step.number == leave:
                break
            step.apply()
        run._engine.calls.finish()
        return model.state_dict()

    with opened(shards=shards) as run:
        whole = train(run, None)
    with opened(shards=shards, out=tmp_path / "run", save_every="2") as run:
        train(run, 3)
    with resumed(tmp_path / "run", shards=shards) as run:
        assert same(train(run, None), whole)


MEASURED: dict[str, Callable[[Run], Any]] = {
    "save": Run.save,
    "evaluate": lambda run: run.evaluate(
        data(16), lambda made, one: {"loss": Mean(losses(made, one).sum(), 16)}
    ),
    "hash": Run.weights_sha256,
}
"""What no state in the middle of a step has an answer for: buffers are those of this worker's shards there."""


@pytest.mark.parametrize("what", ["steps", *MEASURED])
def test_nothing_is_saved_and_no_other_call_begun_in_the_middle_of_a_step(what: str, tmp_path: Path) -> None:
    def train(run: Run) -> None:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for step in run.steps(data(), batch_size=4, epochs=1):
            for batch in step:
                step.backward(losses(model, batch))
            if step.number == 1 and what in MEASURED:
                MEASURED[what](run)
            if step.number == 1:
                break
            step.apply()
        next(iter(run.steps(data(), batch_size=4, epochs=1)))

    with (
        opened(out=tmp_path / "run") as run,
        pytest.raises(InputError, match=r"in the middle of step 1, before step\.apply"),
    ):
        train(run)


def test_a_learning_rate_that_is_no_number_is_named(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        model = nn.Linear(4, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for step in run.steps(data(), batch_size=4, epochs=1):
            for batch in step:
                step.backward(losses(model, batch))
            optimizer.param_groups[0]["lr"] = math.nan
            step.apply()

    with (
        opened(out=tmp_path / "run") as run,
        pytest.raises(NonFiniteLossError, match="the optimizer's lr is nan"),
    ):
        train(run)


def test_a_learning_rate_that_was_no_number_is_named_when_it_is_one_again() -> None:
    def train(run: Run) -> None:
        model = nn.Linear(4, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for step in run.steps(data(), batch_size=4, epochs=1):
            for batch in step:
                step.backward(losses(model, batch))
            optimizer.param_groups[0]["lr"] = math.nan if step.number == 1 else 0.05
            step.apply()

    with (
        opened() as run,
        pytest.raises(
            NonFiniteLossError, match=r"step 2: the loss is nan.* for the optimizer's lr was nan in step 1\."
        ),
    ):
        train(run)

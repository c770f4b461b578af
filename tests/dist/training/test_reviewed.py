"""Ways of using a run that once gave a wrong answer without a word."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline import InputError, Loss, Run
from paceline.checkpoint import weights_sha256
from paceline.errors import WorkerFailedError

SAMPLES = 24


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 4, generator=made), torch.randn(SAMPLES, 1, generator=made))


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().flatten()


def task_loss(model: nn.Module, batch: list[Tensor]) -> Loss:
    return Loss.mean(losses(model, batch))


def prepared(run: Run, model: nn.Module) -> nn.Module:
    made, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    return made


def leave_in_the_middle(run: Run, leave_after: int | None) -> str:
    """Save inside the loop and break out of it, or go to the end."""
    model = prepared(run, nn.Linear(4, 1))
    for step in run.steps(data(), batch_size=8, epochs=2):
        for batch in step:
            found = losses(model, batch)
            step.backward(found.sum(), len(found))
        step.apply()
        if step.number == leave_after:
            run.save()
            break
    return weights_sha256(model.state_dict())


def test_a_run_saved_inside_its_loop_resumes_where_it_was(tmp_path: Path) -> None:
    (whole,) = paceline.launch(leave_in_the_middle, None)
    paceline.launch(leave_in_the_middle, 1, out=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    assert paceline.launch(leave_in_the_middle, None, out=tmp_path / "run", resume=True) == (whole,)


def two_backwards(run: Run) -> None:
    model = prepared(run, nn.Linear(4, 1))
    for step in run.steps(data(), batch_size=8, epochs=1):
        for batch in step:
            found = losses(model, batch)
            step.backward(found[:1].sum(), 1)
            step.backward(losses(model, batch)[1:].sum(), len(found) - 1)
        step.apply()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_goes_backward_once(workers: int) -> None:
    with pytest.raises(InputError, match="more often than batches were given"):
        paceline.launch(two_backwards, workers=workers)


def two_calls(run: Run, leave_after: int | None) -> tuple[str, int]:
    """Train on two data sets, one after the other, with a state of the loop's own; leave the second in the middle."""
    model = prepared(run, nn.Linear(4, 1))
    seen = run.register("seen", {"steps": 0, "loss": 0.0})
    for call in range(2):
        for step in run.steps(data(), batch_size=8, epochs=1 + call):
            step.compute(task_loss)
            seen["steps"] += 1
            seen["loss"] += step.result.loss if step.result is not None else 0.0
            if step.number == leave_after:
                break
    assert seen["steps"] == run._engine.state.position.number
    return weights_sha256(model.state_dict()) + str(seen["loss"]), run._engine.state.position.number


def test_a_second_call_is_a_part_of_its_own_and_a_break_is_saved(tmp_path: Path) -> None:
    options: dict[str, Any] = {"shards": 2, "threads": 1, "device": "cpu"}
    (whole,) = paceline.launch(two_calls, None, **options)
    assert whole[1] == 9
    broken = paceline.launch(two_calls, 4, workers=2, out=tmp_path / "run", **options)
    assert [number for _, number in broken] == [5, 5]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-3", "step-5"]
    for found in paceline.launch(two_calls, None, workers=2, out=tmp_path / "run", resume=True, **options):
        assert found == whole


def differs(run: Run) -> None:
    prepared(run, nn.Linear(4, 1))
    seen = run.register("seen", {"rank": 0})
    for step in run.steps(data(), batch_size=8, epochs=1):
        step.compute(task_loss)
        seen["rank"] = run.world.rank


def test_a_state_that_is_not_the_same_on_all_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the state 'seen' of the loop differs between rank 1 and rank 0"):
        paceline.launch(differs, workers=2, out=tmp_path / "run", threads=1, device="cpu")


def fails_behind_the_loop(run: Run) -> int:
    """Raise on one worker when the last step is done, and be heard of before the other has returned."""
    prepared(run, nn.Linear(4, 1))
    for step in run.steps(data(), batch_size=8, epochs=1):
        step.compute(task_loss)
    if run.world.rank == 0:
        raise ValueError("cannot draw the curve")
    time.sleep(1.0)
    return run.world.rank


def test_an_exception_behind_the_last_step_ends_the_launch_and_no_result_is_missing() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        paceline.launch(fails_behind_the_loop, workers=2, threads=1, device="cpu")
    assert "cannot draw the curve" in "".join(caught.value.__notes__)


def leave_apart(run: Run) -> None:
    """Leave the loop by a number of each worker's own."""
    prepared(run, nn.Linear(4, 1))
    for step in run.steps(data(), batch_size=8, epochs=2):
        step.compute(task_loss)
        if step.number == 1 + run.world.rank:
            break


@pytest.mark.parametrize("keeps", [False, True])
def test_workers_that_leave_the_loop_at_different_steps_are_told(keeps: bool, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rank 0 left the loop of run\.steps after step 1, "):
        paceline.launch(
            leave_apart,
            workers=2,
            threads=1,
            device="cpu",
            hang_timeout=2.0,
            out=tmp_path / "run" if keeps else None,
        )


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from (data()[index] for index in range(SAMPLES))


def stream(run: Run) -> int:
    prepared(run, nn.Linear(4, 1))
    for step in run.steps(Stream(), batch_size=8, epochs=1):
        step.compute(task_loss)
    return run._engine.state.position.number


def test_a_stream_may_end_on_a_saved_step(tmp_path: Path) -> None:
    assert paceline.launch(stream, out=tmp_path / "run", save_every="3") == (3,)


class Recomputed(nn.Module):
    """Dropout inside a part whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.ReLU()), nn.Linear(64, 1)

    def forward(self, values: Tensor) -> Tensor:
        made: Tensor = self.head(checkpoint(self.inside, values, use_reentrant=False))
        return made


class Late(nn.Module):
    """A buffer that is left alone in the first step and changes from the second on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            self.seen += values.sum()
        made: Tensor = self.layer(values)
        return made


class Frozen(nn.Module):
    """A normalisation that the user has put to rest."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4).eval(), nn.Linear(4, 1)

    def forward(self, values: Tensor) -> Tensor:
        made: Tensor = self.layer(self.norm(values))
        return made


def train(run: Run, kind: str, double: bool = False) -> tuple[str, dict[str, Tensor]]:
    """Train one of the models above."""
    model = {"Recomputed": Recomputed, "Late": Late, "Frozen": Frozen, "Linear": lambda: nn.Linear(4, 1)}[
        kind
    ]()
    plain = data()
    if double:
        model, plain = model.double(), TensorDataset(*(column.double() for column in plain.tensors))
    replica = run._engine.preparation.prepare_replica(
        model, lambda made: torch.optim.SGD(made.parameters(), lr=0.05)
    )
    for step in run.steps(plain, batch_size=7, epochs=2):
        step.compute(task_loss)
        run.evaluate(
            plain, lambda model, batch: {"loss": paceline.Mean(losses(model, batch).sum(), len(batch[0]))}
        )
    state = replica.state()["model"]
    return weights_sha256(state), state


@pytest.mark.parametrize(("strategy", "workers"), [("dp", 3), ("ddp", 2)])
def test_activations_computed_again_draw_the_same(strategy: str, workers: int) -> None:
    alone = paceline.launch(train, "Recomputed", strategy="single", shards=3, threads=1, device="cpu")[0][0]
    for _ in range(2):
        found = paceline.launch(
            train, "Recomputed", strategy=strategy, workers=workers, shards=3, threads=1, device="cpu"
        )
        assert {weights for weights, _ in found} == {alone}


def test_a_buffer_that_changes_late_is_named() -> None:
    with pytest.raises(InputError, match="the buffer seen began to change after the first step"):
        paceline.launch(train, "Late", strategy="single", shards=2)


def test_what_the_user_froze_stays_frozen() -> None:
    (_, state), *_ = paceline.launch(train, "Frozen", strategy="single")
    assert torch.equal(state["norm.running_mean"], torch.zeros(4))
    assert state["norm.num_batches_tracked"] == 0


def by_hand() -> dict[str, Tensor]:
    """The first step of the float64 run below, in plain torch on the whole batch."""
    from paceline.data import EpochPermutation
    from paceline.world import seeds

    seeds.seed_everything(seeds.derive(0, "model"))
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    columns = [column.double() for column in data().tensors]
    order = EpochPermutation(SAMPLES, 0)
    for epoch in range(2):
        for start in range(0, SAMPLES, 7):
            chosen = torch.as_tensor(order.indices(epoch, start, min(start + 7, SAMPLES)))
            optimizer.zero_grad()
            losses(model, [column[chosen] for column in columns]).mean().backward()
            optimizer.step()
    return model.state_dict()


def test_double_precision_is_double_throughout() -> None:
    (_, state), *_ = paceline.launch(train, "Linear", True, strategy="single", device="cpu")
    for name, value in by_hand().items():
        # A float32 scale anywhere would show as 1e-8; eight float64 steps stay far below.
        assert F.l1_loss(state[name], value) < 1e-13, name


def bad_loss(run: Run) -> Any:
    prepared(run, nn.Linear(4, 1))
    for step in run.steps(data(), batch_size=8, epochs=1):
        step.compute(lambda model, batch: losses(model, batch).mean())  # type: ignore[arg-type,return-value]


def test_refused_input_takes_away_only_what_it_made(tmp_path: Path) -> None:
    (tmp_path / "mine" / "logs").mkdir(parents=True)
    (tmp_path / "mine" / "logs" / "precious").write_text("keep me")
    with pytest.raises(InputError, match=r"paceline\.Loss"):
        paceline.launch(bad_loss, out=tmp_path / "mine")
    assert (tmp_path / "mine" / "logs" / "precious").read_text() == "keep me"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["logs"]

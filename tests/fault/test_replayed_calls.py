"""A loop that keeps its best weights in a file: a resumed run and a worker that joins leave the file what it was."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import InputError
from tests.fault.survivors import BATCH, Samples, set_off
from tests.fault.test_calls import await_newcomer, make

Faults = list[tuple[str, int, int, str]]
STEPS = 4
STRATEGIES = ["single", "ddp", "fsdp"]


def error(model: nn.Module, batch: list[Tensor]) -> dict[str, paceline.Mean]:
    return {
        "error": paceline.Mean(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0]))
    }


def here(model: nn.Module) -> dict[str, Tensor]:
    """Return what this worker has; all of it would take all of them, and one that joins is elsewhere."""
    return {name: getattr(one, "to_local", one.detach)().clone() for name, one in model.state_dict().items()}


def train(
    run: paceline.Run,
    folder: str,
    calls: int,
    *,
    asks: bool,
    faults: Faults = (),  # type: ignore[assignment]
) -> tuple[Any, ...]:
    """Train, measure, and keep the best: that of the first call, because it gets worse from there on."""
    model, _ = run.prepare(make, lambda made: torch.optim.SGD(made.parameters(), lr=0.05))
    best = run.register("best", {"error": 1e9, "call": -1})
    saved, warned = [], []
    for call in range(calls):
        for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
            set_off(run, folder, faults, f"call {call}")
            if faults and run.world.size < run._engine.state.workers:
                await_newcomer(run)
            for features, labels in step:
                sign = 1 if call == 0 else -4
                step.backward(sign * F.cross_entropy(model(features), labels, reduction="none"))
            step.apply()
        found = run.evaluate(Samples(), error)["error"]
        run.weights_sha256()
        if found < best["error"]:
            best.update(error=found, call=call)
            if not (asks and run.replaying):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    state = here(model)
                warned += [str(one.message) for one in caught if "run.replaying" in str(one.message)]
                saved.append(call)
                if run.world.is_first:
                    torch.save(state, Path(folder) / "best.pt")
    return dict(best), saved, warned, run.world.size, run.weights_sha256()


def launch(
    folder: Path, calls: int, *, asks: bool = True, faults: Faults | None = None, **options: Any
) -> Any:
    chosen = {"shards": 2, "device": "cpu", "threads": 1, "out": folder / "run", **options}
    return paceline.launch(train, str(folder), calls, kwargs={"asks": asks, "faults": faults or []}, **chosen)


def many(strategy: str) -> dict[str, Any]:
    return {"strategy": strategy, "workers": 1 if strategy == "single" else 2}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_loop_leaves_its_best_alone(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    straight = launch(tmp_path / "whole", 4, **many(strategy))
    launch(tmp_path, 3, **many(strategy))
    kept = (tmp_path / "best.pt").read_bytes()
    with pytest.raises(InputError, match=r"after call 1 of run\.steps.*those of step 12.*run\.replaying"):
        launch(tmp_path, 4, asks=False, resume=True)
    assert (tmp_path / "best.pt").read_bytes() == kept
    resumed = launch(tmp_path, 4, resume=True)
    assert [(best, weights) for best, *_, weights in resumed] == [
        (best, weights) for best, *_, weights in straight
    ]
    assert [saved for _, saved, *_ in resumed] == [[]] * len(resumed)
    assert (tmp_path / "best.pt").read_bytes() == kept


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_worker_that_joins_leaves_it_alone_and_does_not_end_the_run(
    strategy: str, asks: bool, tmp_path: Path
) -> None:
    options = {**many(strategy), "peer_snapshots": int(strategy == "fsdp")}
    # Late enough that a copy of this call has come to the neighbour: one of the call before would start the run over.
    for name, faults in (("quiet", []), ("faults", [("call 2", 3 * STEPS - 2, 0, "kill")])):
        (tmp_path / name).mkdir()
        results = launch(tmp_path / name, 3, asks=asks, faults=faults, **options)
        assert [size for *_, size, _ in results] == [2, 2]
    first, joined = results
    assert first[0] == joined[0]
    assert first[0]["call"] == 0
    assert (first[1], first[2]) == ([0], [])
    # It calls state_dict on every worker, and the joined one is told that these are other weights.
    assert (joined[1], len(joined[2])) == (([], 0) if asks else ([0], 1))
    quiet, best = (torch.load(tmp_path / name / "best.pt") for name in ("quiet", "faults"))
    assert all(torch.equal(quiet[name], best[name]) for name in quiet)

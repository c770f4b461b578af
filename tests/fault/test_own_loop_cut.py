"""A loop of the user's own goes on with the model and the optimizer that it holds, also where each group makes them anew."""

import pytest
import torch
from torch.nn import functional as F

import paceline
from paceline.strategies.tuning import Tuning
from paceline.world import fault_points
from tests.fault.survivors import BATCH, Samples, set_off
from tests.fault.test_survive_cut import model as make

STEPS = 10


def train(run, folder, faults=()):
    """Train with the objects that `prepare` gave, learning rate included."""
    model, optimizer = run.prepare(make, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    first, passes = model[0], set()
    first.register_forward_hook(lambda *_: passes.add((run._engine.state.position.number, first.training)))
    first.eval()
    first.note = "kept"
    fault_points.set_fault(lambda point: set_off(run, folder, faults, point))
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS, max_grad_norm=1.0):
        set_off(run, folder, faults, "loop")
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step.number)
        for features, labels in step:
            each = F.cross_entropy(model(features), labels, reduction="none")
            step.backward(each.sum(), len(labels))
        step.apply()
    fault_points.set_fault(None)
    assert run._engine.state.replica.model is model
    assert run._engine.state.replica.optimizer is optimizer
    assert model[0] is first
    assert first.note == "kept"
    assert passes in (set(), {(number, False) for number in range(STEPS)}), passes  # nothing on a server
    assert len(first._forward_hooks) <= 2  # the loop's own, and fully_shard's where there are several workers
    return {
        "weights": run.weights_sha256(),
        "size": run.world.size,
        "recoveries": len(run._engine.state.recoveries),
    }


def launch(folder, faults, workers, strategy, **options):
    folder.mkdir(exist_ok=True)
    options = {"shards": 4, "device": "cpu", "out": folder / "run", "threads": 1, **options}
    return paceline.launch(train, str(folder), faults, workers=workers, strategy=strategy, **options)


KINDS = {"fsdp": Tuning(), "ddp": Tuning(shard_optimizer=True), "ps": Tuning()}


@pytest.mark.parametrize(("precision", "strategies"), [("fp32", ["fsdp", "ddp", "ps"]), ("bf16", ["fsdp"])])
def test_the_loop_goes_on_with_the_objects_that_it_holds(tmp_path, precision, strategies):
    (one,) = launch(tmp_path / "quiet", (), 1, "single", precision=precision)
    for strategy in strategies:
        results = launch(
            tmp_path / strategy,
            [("loop", 4, 1, "notice")],
            2,
            strategy,
            precision=precision,
            tuning=KINDS[strategy],
            peer_snapshots=1,
            max_restarts=0,
        )
        assert {result["weights"] for result in results} == {one["weights"]}, strategy
        assert (len(results) == 1) == (strategy != "ps"), strategy


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_worker_killed_while_another_is_in_its_forward_pass_is_outlived(transport, tmp_path):
    """Weights are gathered there, in the middle of the user's code: the loop goes on to apply, and is given the step again."""
    (one,) = launch(tmp_path / "quiet", (), 1, "single")
    faults = [("forward", 3, 1, "kill"), ("data", 6, 0, "kill")]
    options = {"transport": transport, "peer_snapshots": 1, "snapshot_every": 1, "max_restarts": 0}
    (result,) = launch(tmp_path / "cut", faults, 3, "fsdp", **options)
    assert (result["weights"], result["recoveries"], result["size"]) == (one["weights"], 2, 1)

"""Trainings that something happens to: what their workers run, and the faults they set off in themselves."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import paceline
from paceline.launch.control import order
from paceline.world import fault_points

STEPS = 24
BATCH = 24


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 108

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), index % 3


def once(folder, name):
    """Say yes to the first who asks, over the lives of all workers."""
    try:
        os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def mean_output(model, batch):
    """Measure something."""
    return {"mean": paceline.Mean(model(batch[0]).sum(), len(batch[0]))}


def measured(run, folder, faults, model, batch):
    """Measure the same where something may happen."""
    set_off(run, folder, faults, "metrics")
    return mean_output(model, batch)


def train(run, folder, faults=(), steps=STEPS, slow=None):
    """Train in a loop of one's own; `faults` are (name, step, rank, action), each set off once.

    The worker that had rank `slow` first takes 40 ms longer for each shard.
    """
    lag = 0.04 if run.world.rank == slow else 0.0
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
    model, _ = run.prepare(
        model,
        lambda made: torch.optim.AdamW(made.parameters(), lr=0.05),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    )
    average = run.register("average", AveragedModel(model))
    assert list(run.evaluate(Samples(), mean_output)) == ["mean"]  # alone, for a worker that is to join
    fault_points.set_fault(lambda point: set_off(run, folder, faults, point))
    given = []
    for step in run.steps(Samples(), batch_size=BATCH, steps=steps):
        given.append(step.number)
        if faults and run._engine.state.options.max_restarts and run.world.size < run._engine.state.workers:
            time.sleep(0.4)  # the one that is missing is on its way; faults are to meet a whole group
        set_off(run, folder, faults, "loop")
        for inputs, targets in step:
            time.sleep(lag)
            losses = F.cross_entropy(model(inputs), targets, reduction="none")
            step.backward(losses.sum(), len(losses))
        result = step.apply(max_grad_norm=1.0)
        assert result.again == step.again
        if not result.again:
            average.update_parameters(model)
        if step.number in (7, 15) and not step.again:
            run.evaluate(Samples(), partial(measured, run, folder, faults))
    fault_points.set_fault(None)
    return {
        "weights": hashed(model),
        "average": hashed(average),
        "given": given,
        "recoveries": run._engine.state.recoveries,
        "size": run.world.size,
        "pid": os.getpid(),
    }


def hashed(model):
    """Give one number for a model's state."""
    return hashlib.sha256(
        b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
    ).hexdigest()


def set_off(run, folder, faults, point):
    """Come to a point of the training, and do what is planned there."""
    for index, (where, step, rank, action) in enumerate(faults):
        here = where == point and run._engine.state.position.number >= step and rank in (run.world.rank, None)
        if here and once(folder, f"fault-{index}-{rank if rank is not None else run.world.rank}"):
            ACTIONS[action](run)


def resize_to(workers):
    def resize(run):
        order(run._engine.state.options.out, {"do": "resize", "workers": workers})

    return resize


def order_stop(run):
    order(run._engine.state.options.out, {"do": "stop"})


def grow(run):
    """Ask for a fourth worker, and wait until it is there and the group is to change at the next step."""
    resize_to(4)(run)
    while not run._engine.recovery.membership.change_wanted:
        time.sleep(0.01)


def fail(_):
    raise ValueError("a passing trouble")


def kill_store(_):
    """Kill the child of the fork server that is no worker: it listens, and nobody else does."""
    server = os.getppid()
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    store = min(map(int, children))
    assert store != os.getpid()
    os.kill(store, signal.SIGKILL)
    time.sleep(0.2)


def disagree(run):
    """Wait for a message from a worker that waits for one too."""
    run.world.comm.recv(like=torch.ones(3), source=(run.world.rank + 1) % run.world.size)


ACTIONS = {
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda _: time.sleep(600),
    "stall": lambda run: time.sleep(6 + 0.3 * run.world.rank),
    "disagree": disagree,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda _: os._exit(3),
    "exit well": lambda _: os._exit(0),
    "leave well": lambda _: sys.exit(0),
    "abort": lambda _: os.abort(),
    "notice": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "kill fork server": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "kill store": kill_store,
    "raise": fail,
    "ctrl-c": lambda run: os.kill(
        int((run._engine.state.options.out.parent / "launcher").read_text()), signal.SIGINT
    ),
    "order to stop": order_stop,
    "to 1": resize_to(1),
    "to 3": resize_to(3),
    "to 4": resize_to(4),
    "to 4 and wait": grow,
}

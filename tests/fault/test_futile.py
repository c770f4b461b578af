"""What would be tried for ever is counted, and comes to an end: groups that cannot form, starts that hang, a step that kills."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.data.permutation import EpochPermutation
from paceline.errors import WorkerFailedError
from paceline.launch.control import NAME
from paceline.launch.workers.fork_server import ForkServer
from paceline.world import fault_points
from tests.fault.survivors import hashed, once

STEPS, BATCH, SAMPLES = 12, 12, 60
POISON = 17


class Numbers(torch.utils.data.Dataset):
    """Samples that are told apart by their first number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([index, index % 7, 1.0]), index % 3


def train(run, folder, *, kill=None, cut=(), hang=None, poison=None, stuck=None, orders=(), steps=STEPS):
    """Train; `kill` is a step that rank 1 dies in, `stuck` one that it hangs in.

    `cut` are the first ranks that never get into a new group, `orders` what rank 0 or 1 asks the launcher for.
    `hang` names a file that the first newcomer leaves and then hangs at; `poison` is where the sample POISON kills its worker.
    """
    newcomer = run._engine.recovery.membership.newcomer
    if hang and newcomer and once(folder, hang):
        time.sleep(600)
    unreachable = not newcomer and run.world.rank in cut
    model, _ = run.prepare(nn.Linear(3, 3), lambda made: torch.optim.SGD(made.parameters(), lr=1e-3))

    def come_to(point):
        if point == fault_points.REGROUP and unreachable:
            raise RuntimeError("[gloo/transport/tcp] no way to the others")

    fault_points.set_fault(come_to)
    for step in run.steps(Numbers(), batch_size=BATCH, steps=steps):
        if kill == step.number and run.world.rank == 1 and once(folder, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if orders and step.number == 2 and once(folder, "asked"):
            (Path(folder) / "answers").write_text(json.dumps([ask(run, order) for order in orders]))
        if stuck == step.number and run.world.rank == 1 and once(folder, "stuck"):
            time.sleep(600)
        for inputs, targets in step:
            if poison is not None and POISON in inputs[:, 0]:
                os.kill(os.getpid(), poison)
            losses = F.cross_entropy(model(inputs), targets, reduction="none")
            step.backward(losses.sum(), len(losses))
        step.apply()
        if kill is not None:
            time.sleep(0.1)
    fault_points.set_fault(None)
    return hashed(model)


def run(folder, workers=3, *, given=None, **options):
    options = {"shards": 6, "hang_timeout": 2.0, "device": "cpu", "out": folder / "run", **options}
    return paceline.launch(train, str(folder), workers=workers, threads=1, kwargs=given or {}, **options)


def events(folder, kind):
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def ask(run, workers):
    """Send an order as it stands, number and all, and return the answer."""
    found = json.loads((run._engine.state.options.out / NAME).read_text())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(found["socket"])
        connection.sendall(f'{{"do": "resize", "workers": {workers}}}'.encode())
        return json.loads(connection.makefile().readline())


def test_an_order_for_a_strange_number_of_workers_is_refused_in_a_line(tmp_path, undisturbed):
    orders = ["1e400", "-1e400", "NaN", "-3", "0", "2.5", "1" + "0" * 40, "true", '"many"', "null", "[]"]
    results = run(tmp_path, 2, given={"orders": orders})
    assert set(results) == {undisturbed}
    answers = json.loads((tmp_path / "answers").read_text())
    assert [answer["ok"] for answer in answers] == [False] * len(orders)
    assert all("\n" not in answer["said"] and "workers" in answer["said"] for answer in answers), answers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run that nothing happened to."""
    return run(tmp_path_factory.mktemp("quiet"), 1)[0]


def test_a_worker_that_gets_into_no_group_is_expelled_and_replaced(tmp_path, undisturbed):
    results = run(tmp_path, given={"kill": 3, "cut": [2]})
    assert set(results) == {undisturbed}
    lost = [event["reason"] for event in events(tmp_path, "worker_lost")]
    assert len(lost) == 2
    assert lost[1].startswith("could not get into a group with the others")
    assert "no way to the others" in lost[1]
    told = [note["text"] for note in events(tmp_path, "note")]
    assert sum("did not come about" in text for text in told) == 2
    assert max(event["generation"] for event in events(tmp_path, "regrouped")) < 10


def test_where_no_group_can_form_the_run_ends_and_says_why(tmp_path):
    with pytest.raises(WorkerFailedError, match="no way to the others"):
        run(tmp_path, given={"kill": 3, "cut": [0, 2]}, max_restarts=0)


def test_a_replacement_that_hangs_while_it_starts_is_replaced(tmp_path, undisturbed):
    results = run(tmp_path, 2, given={"kill": 3, "hang": "hung"}, min_workers=2, hang_timeout=0.5)
    assert set(results) == {undisturbed}
    assert (tmp_path / "hung").exists()
    reason = events(tmp_path, "worker_lost")[1]["reason"]
    assert reason.startswith("did not come up within ")
    assert "test_futile.py:" in reason


def test_a_worker_that_sigkill_does_not_end_blocks_nobody(tmp_path, undisturbed, monkeypatch):
    """The kernel keeps SIGKILL back from a process in uninterruptible sleep; here it is kept back before it gets there."""
    held = []

    def keep_back(server, pid, number):
        if number == signal.SIGKILL and (not held or pid in held):
            held.append(pid)
        else:
            send(server, pid, number)

    send = ForkServer.signal
    monkeypatch.setattr(ForkServer, "signal", keep_back)
    try:
        results = run(tmp_path, given={"stuck": 3}, hang_timeout=1.0)
        assert set(results) == {undisturbed}
        assert [event["reason"] for event in events(tmp_path, "worker_lost")] == ["made no progress"]
        os.kill(held[0], 0)  # it is still there, and nobody has waited for it
    finally:
        for pid in set(held):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("workers", "number"), [(3, signal.SIGSEGV), (2, signal.SIGKILL), (1, signal.SIGSEGV)]
)
def test_a_step_that_kills_its_workers_by_a_signal_is_named_and_ends_the_run(workers, number, tmp_path):
    order = EpochPermutation(SAMPLES, 0)
    place = order.position(0, POISON)
    with pytest.raises(WorkerFailedError) as caught:
        run(tmp_path, workers, given={"poison": number})
    words = str(caught.value)
    assert f"was killed by {number.name} in step {place // BATCH}" in words
    shard = place % BATCH * 6 // BATCH
    assert str(shard) in words.partition("shard")[2].partition("(")[0], words
    assert str(POISON) in words.partition("samples ")[2], words
    assert len(events(tmp_path, "worker_lost")) == 1

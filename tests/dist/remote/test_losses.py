"""A worker dies or fails while others call it: what they see, and how the launch ends."""

import atexit
import json
import os
import signal
import threading
import time

import pytest

import paceline
from paceline import remote
from paceline.errors import WorkerFailedError
from paceline.remote import Role
from tests.dist.remote.checks import caught, eventually
from tests.dist.remote.services import LIMIT_S, Desk, pid

_tired = threading.Event()


@remote.function
def tire() -> None:
    _tired.set()


@remote.function
def lost() -> list[str]:
    return sorted(remote.current().lost)


def observe(session):
    _tired.wait(LIMIT_S)
    raise ValueError("too tired to look")


def end_badly(session):
    atexit.register(os._exit, 3)
    return session.name


def command(session):
    """Lose both observers, one after the other, and see what is left."""
    near, far = remote.create("server:0", Desk), remote.create("observer:0", Desk)
    thing, pending, going_on = far.thing.remote(), far.stall.future(), near.stall.future()
    os.kill(remote.call("observer:0", pid)(), signal.SIGKILL)
    began = time.monotonic()
    found = {"pending": caught(pending.wait), "seconds": time.monotonic() - began}
    found["reference"] = caught(thing.fetch)
    found["called again"] = caught(far.add)
    found["create"] = caught(lambda: remote.create("observer:0", Desk))
    found["there"] = session.workers("observers")
    near.release()
    found["others"] = going_on.wait()
    found["told"] = eventually(["observer:0"], remote.call("server:0", lost))
    remote.call("observer:1", tire).future()  # it may be gone before it answers
    found["both"] = eventually(["observer:0", "observer:1"], remote.call("server:0", lost))
    return found


def test_the_others_go_on_without_a_worker_that_is_not_required(tmp_path, capfd):
    results = paceline.launch_roles(
        {
            "commander": Role(command),
            "clerk": Role(end_badly, required=False),
            "observers": Role(observe, workers=2, required=False),
            "servers": 1,
        },
        out=tmp_path / "run",
        threads=1,
    )
    (found,) = results["commander"]
    assert results["observers"] == (None, None)
    assert results["clerk"] == ("clerk:0",)
    assert results["servers"] == (None,)
    for what in ("pending", "reference", "called again", "create"):
        assert found[what][0] == "WorkerGoneError", found[what]
        assert "observer:0 is gone" in found[what][1]
    assert found["seconds"] < LIMIT_S / 2
    assert found["there"] == ("observer:1",)
    assert found["others"] == 1
    assert found["told"] == ["observer:0"]
    assert found["both"] == ["observer:0", "observer:1"]
    said = capfd.readouterr().err
    assert "was killed by SIGKILL; the others go on without it." in said
    assert "observer:1 (rank 3 on " in said
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["rank"]) for event in events] == [
        ("worker_lost", rank) for rank in (2, 3, 1)
    ]
    assert "ValueError: too tired to look" in (tmp_path / "run" / "logs" / "rank-3.log").read_text()


def wait_for_the_dead(session):
    desk = remote.create("server:0", Desk)
    pending = desk.stall.future()
    os.kill(remote.call("server:0", pid)(), signal.SIGKILL)
    pending.wait()


def test_the_loss_of_a_required_worker_ends_the_launch_with_its_cause(tmp_path):
    with pytest.raises(WorkerFailedError, match=r"rank 2 on .* was killed by SIGKILL") as caught_error:
        paceline.launch_roles(
            {"trainers": Role(wait_for_the_dead, workers=2), "servers": 1}, out=tmp_path / "run"
        )
    assert caught_error.value.__notes__[-1] == "rank 2 is server:0."


def fail_or_serve(session):
    if session.name == "trainer:1":
        raise ValueError("mine")
    remote.create("server:0", Desk).stall()


def test_an_exception_in_a_role_ends_the_launch_with_its_own_traceback(tmp_path):
    with pytest.raises(WorkerFailedError, match=r"rank 1 on .* failed") as caught_error:
        paceline.launch_roles(
            {"trainers": Role(fail_or_serve, workers=2), "servers": 1}, out=tmp_path / "run"
        )
    assert "ValueError: mine" in caught_error.value.trace
    assert "role_call" not in caught_error.value.trace


def trust_the_unsteady(session):
    os.kill(remote.call("observer:0", pid)(), signal.SIGKILL)
    remote.call("observer:0", pid)()


def test_one_that_cannot_do_without_the_lost_one_says_so(tmp_path):
    with pytest.raises(WorkerFailedError, match=r"rank 0 on .* failed") as caught_error:
        paceline.launch_roles(
            {"trainer": Role(trust_the_unsteady), "observers": Role(required=False), "servers": 1},
            out=tmp_path / "run",
        )
    assert "WorkerGoneError: pid failed: observer:0 is gone." in caught_error.value.trace


def unwanted(session):
    raise AssertionError("nobody may come this far")


@pytest.mark.parametrize(
    ("roles", "options", "words"),
    [
        ({}, {}, "there is no role"),
        ({"servers": 2}, {}, "no role has a function"),
        ({"servers": "2"}, {}, "the role servers is '2'"),
        (
            {"trainers": Role(unwanted), "servers": 0},
            {},
            "workers of the role servers is 0, but must be at least 1",
        ),
        ({"trainers": Role(unwanted), "trainer": 1}, {}, "would have the same name"),
        ({"Trainers": Role(unwanted)}, {}, "'Trainers' is no name for a role"),
        ({"trainers": Role(lambda session: None)}, {}, "is defined inside a function or is a lambda"),
        ({"trainers": Role(unwanted)}, {"interface": "nowhere9"}, "no network interface 'nowhere9'"),
        ({"trainers": Role(unwanted, args=(threading.Lock(),))}, {}, "cannot be sent to another process"),
    ],
)
def test_roles_that_cannot_be_are_refused_before_anything_starts(roles, options, words):
    with pytest.raises(paceline.InputError, match=words):
        paceline.launch_roles(roles, **options)

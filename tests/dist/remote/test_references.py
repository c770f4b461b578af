"""References when many are in flight, and when nobody is left to let go of them."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import PrefixStore

import paceline
from paceline import remote
from paceline.remote import Role
from paceline.remote.names import Roles
from paceline.remote.opening import open_session
from tests.dist.remote.checks import caught, count_alive, eventually
from tests.dist.remote.services import LIMIT_S, Desk, Keeper, Thing, alive, pid

THREADS, TURNS = 16, 40
_go_on = threading.Event()
_held: list[object] = []


@remote.function
def go_on() -> None:
    _go_on.set()


@remote.service
class Slow:
    """Takes its time to come to be."""

    def __init__(self) -> None:
        alive.add(self)
        _go_on.wait(LIMIT_S)

    def nothing(self) -> None:
        """Be a method: a service has one."""


@remote.function
def fetch(given):
    return given.fetch()


def pass_many_on(session):
    """Hand values from worker to worker on many threads at once; each reference is let go of as soon as it is passed on."""
    desk, passed_on = remote.create("server:0", Desk), remote.call("server:1", fetch)

    def turns(thread):
        for turn in range(TURNS):
            value = torch.full((500,), float(thread * TURNS + turn))
            assert torch.equal(passed_on.remote(desk.echo.remote(value)).fetch(), value)
        return TURNS

    with ThreadPoolExecutor(THREADS) as threads:
        done = sum(threads.map(turns, range(THREADS)))
    return done, eventually([], _values)


def _values():
    return [one.what for one in remote.references() if one.what != "Desk"]


def test_many_references_in_flight_do_not_wait_for_each_other():
    results = paceline.launch_roles({"master": Role(pass_many_on), "servers": 2}, threads=1)
    assert results["master"] == ((THREADS * TURNS, []),)


@remote.function
def own_thing():
    """Give a reference in an answer."""
    return remote.reference(Thing())


@remote.function
def ask_for_one() -> None:
    _held.append(remote.call("server:0", own_thing)())


def lose_a_holder(session):
    """Let a worker hold a value, the service that made it, and what came in an answer; then lose that worker."""
    desk, keeper = remote.create("server:0", Desk), remote.create("observer:0", Keeper)
    keeper.keep([desk.thing.remote(), desk])
    remote.call("observer:0", ask_for_one)()
    held = eventually(
        3, remote.call("server:0", count_alive)
    )  # the call that makes the first may still be on its way
    del desk
    still = remote.call("server:0", count_alive)()
    os.kill(remote.call("observer:0", pid)(), signal.SIGKILL)
    return held, still, eventually(0, remote.call("server:0", count_alive))


def test_what_a_lost_worker_held_is_freed():
    results = paceline.launch_roles(
        {"master": Role(lose_a_holder), "servers": 1, "observers": Role(required=False)}, threads=1
    )
    assert results["master"] == ((3, 3, 0),)


def create_in_vain(session):
    problem = caught(lambda: remote.create("server:0", Slow))
    begun = eventually(1, remote.call("server:0", count_alive))
    remote.call("server:0", go_on)()
    return problem[0], begun, eventually(0, remote.call("server:0", count_alive))


def test_a_service_that_came_too_late_is_freed():
    results = paceline.launch_roles({"master": Role(create_in_vain), "servers": 1}, threads=1, timeout_s=1)
    assert results["master"] == (("CallTimeoutError", 1, 0),)


def ask_in_vain(session):
    """Fetch what a call was to make that was refused, or that took too long: who asked hears it, and who was passed it."""
    desk = remote.create("server:0", Desk)
    late = desk.stall.options(timeout=0.3).remote()
    there = caught(lambda: remote.call("server:1", fetch)(late))
    here = caught(late.fetch)
    desk.release()
    refused = desk.echo.remote(threading.local)
    time.sleep(0.2)  # the word that it was refused comes before anybody asks
    unread = caught(lambda: desk.echo([refused, threading.local]))
    return here[0], there[0], caught(refused.fetch)[0], unread[0], caught(lambda: pickle.dumps(refused))[0]


def test_a_value_that_could_not_be_asked_for_fails_for_all_that_want_it():
    results = paceline.launch_roles({"master": Role(ask_in_vain), "servers": 2}, threads=1)
    late, refused = "CallTimeoutError", "CallRefusedError"
    assert results["master"] == ((late, late, refused, refused, "InputError"),)


@remote.function
def give_up():
    raise TimeoutError("mine")


def keep_a_failure(session):
    try:
        return remote.call(session.name, give_up).remote().fetch()
    except Exception as error:  # noqa: BLE001  (looked at by the test)
        return type(error).__name__, str(error)


def test_a_failure_that_is_kept_here_is_the_functions_own():
    results = paceline.launch_roles({"master": Role(keep_a_failure), "servers": 1}, threads=1)
    assert results["master"] == (("TimeoutError", "mine"),)


def ask_and_forget(session):
    """Let go of a service and of the reference to its value while the calls are in flight."""
    fetched = remote.call("server:1", fetch)
    return [fetched(remote.create("server:0", Desk, turn).add.remote()) for turn in range(200)]


def test_a_service_lives_until_the_calls_under_way_have_come_to_it():
    results = paceline.launch_roles({"master": Role(ask_and_forget), "servers": 2}, threads=1)
    assert results["master"] == ([turn + 1 for turn in range(200)],)


def open_twice(run):
    """Enter two sessions, one after the other, and bring something of the first into the second."""
    world, found = run.world, []
    for turn in range(2):
        store = PrefixStore(f"session {turn}", world.store)
        roles = Roles.of({"masters": 1, "servers": 1})
        with open_session(store, world.rank, roles, b"secret") as session:
            if session.role == "masters":
                desk = remote.create("server:0", Desk)
                found.append((desk, desk.echo.remote(turn)))
                if turn:
                    (service, value), new = found[0], found[1][1].fetch()
                    return caught(value.fetch)[0], caught(service.add)[0], new
    return None


def test_what_is_of_one_session_is_nothing_in_the_next():
    assert paceline.launch(open_twice, workers=2)[0] == ("InputError", "RemoteError", 1)

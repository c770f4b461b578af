"""References when many are in flight, and when nobody is left to let go of them."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import paceline
from paceline import remote
from paceline.remote import Role
from tests.dist.remote.checks import caught, count_alive, eventually
from tests.dist.remote.services import LIMIT_S, Desk, Keeper, alive, pid

THREADS, TURNS = 16, 40
_go_on = threading.Event()


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


def lose_a_holder(session):
    """Let a worker hold a value, then the service that made it, and lose that worker."""
    desk, keeper = remote.create("server:0", Desk), remote.create("observer:0", Keeper)
    keeper.keep([desk.thing.remote(), desk])
    held = remote.call("server:0", count_alive)()
    del desk
    still = remote.call("server:0", count_alive)()
    os.kill(remote.call("observer:0", pid)(), signal.SIGKILL)
    return held, still, eventually(0, remote.call("server:0", count_alive))


def test_what_a_lost_worker_held_is_freed():
    results = paceline.launch_roles(
        {"master": Role(lose_a_holder), "servers": 1, "observers": Role(required=False)}, threads=1
    )
    assert results["master"] == ((2, 2, 0),)


def create_in_vain(session):
    problem = caught(lambda: remote.create("server:0", Slow))
    begun = remote.call("server:0", count_alive)()
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
    refused = caught(desk.echo.remote(threading.local).fetch)
    return here[0], there[0], refused[0]


def test_a_value_that_could_not_be_asked_for_fails_for_all_that_want_it():
    results = paceline.launch_roles({"master": Role(ask_in_vain), "servers": 2}, threads=1)
    assert results["master"] == (("CallTimeoutError", "CallTimeoutError", "CallRefusedError"),)

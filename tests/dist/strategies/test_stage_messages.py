"""Messages between the stages of a pipeline."""

from __future__ import annotations

import time
from dataclasses import replace
from threading import Timer

import torch

from paceline.strategies.pipeline.p2p import Links
from paceline.world import World
from paceline.world.interruption import InterruptedWaitError, Interruption
from tests.patience import HANG_S
from tests.workers import run_workers

LARGE = 1 << 22
"""Numbers: more than the sockets hold, so that it leaves only when it is received."""


def send_to_nobody(world: World) -> str:
    """Send a message that the other takes only once this worker has given up: gloo itself never would."""
    assert world.store is not None
    if world.rank:
        world.store.get("has given up")
        return "told"
    interruption = Interruption()  # one that breaks no socket
    links = Links(replace(world, interruption=interruption))
    links.send(1, "a note", [torch.zeros(LARGE)])
    timer = Timer(0.2, interruption.interrupt)
    timer.start()
    started = time.monotonic()
    try:
        links.flush()
    except InterruptedWaitError:
        return "interrupted" if time.monotonic() - started < HANG_S / 2 else "late"
    finally:
        timer.join()
        world.store.set("has given up", "")
    return "left"


def test_whoever_waits_for_a_message_to_leave_hears_that_the_group_is_broken() -> None:
    assert run_workers(send_to_nobody, 2) == ["interrupted", "told"]

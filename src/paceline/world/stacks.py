"""Lets the launcher see where a worker stands: its Python stacks, and the collectives that torch says are pending.

Stacks come from faulthandler, in a signal handler written in C: it answers also while the main thread is stuck in a
library or holds the interpreter's lock. Pending collectives come from torch's flight recorder, through a thread that
sleeps until the launcher asks; it answers whenever the interpreter's lock is free, as it is inside a collective.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import signal
import threading
from typing import Any

from paceline.compat import futex
from paceline.world.status_page import StatusPage

SIGNAL = signal.SIGUSR2
SHOWN = 16
"""Pending collectives that are told at most, the oldest first: it is those that hold a worker up."""
_LONGEST = 60
"""Letters of a name: with that, what is told fits a status page."""


def create() -> int:
    """Make the anonymous file that a worker's stacks are written to, and give its descriptor."""
    descriptor = os.memfd_create("paceline-stacks")
    # Every dump goes after the last one, whoever else holds the same descriptor.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return descriptor


def register(descriptor: int) -> None:
    """Write the Python stacks of all threads to `descriptor` whenever the launcher sends `SIGNAL`; keep it open."""
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


def attend(status_page: StatusPage) -> None:
    """Answer the launcher's questions about pending collectives, from a thread that sleeps in between."""
    if futex.available():
        threading.Thread(target=_attend, args=(status_page,), name="paceline-witness", daemon=True).start()


def flight_record() -> list[dict[str, Any]]:
    """Return the collectives of this process that have begun and not ended, oldest first; none where torch keeps no record.

    The recorder is on by default for gloo and nccl and holds the last 2000 collectives (TORCH_FR_BUFFER_SIZE; 0 turns
    it off). Its cost was below the noise of 20 us for an all_reduce of gloo among one; reading it takes 40 to 150 ms.
    """
    from paceline.compat import process_groups

    # Of `state` gloo says nothing.
    return [
        {
            "number": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
            "name": entry["profiling_name"].partition(":")[2][:_LONGEST] or "unknown",
            "group": entry["process_group"][1][:_LONGEST],
        }
        for entry in process_groups.flight_record()
        if not entry["retired"]
    ]


def _attend(status_page: StatusPage) -> None:
    question = 0
    while True:
        question = status_page.wait_for_question(question)
        status_page.answer(question, json.dumps(flight_record()[:SHOWN], separators=(",", ":")).encode())

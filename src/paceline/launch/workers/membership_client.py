"""A worker's line to its launcher: where it stands goes up, its place in the next group comes down.

A thread listens, and only that: in steady state nothing is sent either way.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from paceline.compat import pickles
from paceline.launch import failures
from paceline.recovery.membership import LeaveRunError, Place, Standing
from paceline.world import env
from paceline.world.env import Identity

if TYPE_CHECKING:
    from paceline.world.interruption import Interruption


class MembershipClient:
    """The membership of a worker whose launcher watches over it."""

    def __init__(self, launcher: Connection, *, newcomer: bool, elastic: bool) -> None:
        self.newcomer, self.elastic = newcomer, self if elastic else None
        self._launcher = launcher
        self._lock = threading.Lock()
        self._places: queue.SimpleQueue[Place | None] = queue.SimpleQueue()
        self._generation = 0
        self._wanted = -1
        """The latest generation that is to be left at a step."""
        self._broken = -1
        """The latest generation that was to be left at once."""
        self._interruption: Interruption | None = None
        self._listens = False
        self.leaving = False
        """Whether this worker is to leave the run."""

    @property
    def change_wanted(self) -> bool:
        """Whether the group is to be left at the beginning of the next step."""
        return self._wanted >= self._generation

    def tell(self, kind: str, value: Any = None) -> None:
        """Send the launcher one message."""
        message = pickles.dumps((kind, value))
        with self._lock:
            self._launcher.send_bytes(message)

    def begin(self) -> None:
        """Report that training begins, and start to listen; from here on SIGTERM is a notice to leave."""
        if self._listens:
            return
        self._listens = True
        if self.elastic is None:
            self.tell("began")
            return
        threading.Thread(target=self._listen, name="paceline-membership", daemon=True).start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_notice)
        if not self.newcomer:
            self.tell("began")

    def attach(self, generation: int, interruption: Interruption) -> None:
        """Have a group's interruption raised when that group is to be left at once."""
        self._generation, self._interruption = generation, interruption
        if self._broken >= generation:
            interruption.interrupt()

    def report_error(self, error: Exception, step: int) -> None:
        """Report an exception of the user's code, in an evaluation that all are to do once more."""
        self.tell("raised", failures.from_exception(error, -1, env.host(), step))

    def next_place(self, standing: Standing | None) -> Place:
        """Return where this worker stands, and wait for its place in the next group."""
        self.tell("ready") if standing is None else self.tell("broken", asdict(standing))
        place = self._places.get()
        if place is None:
            raise LeaveRunError
        return place

    def _listen(self) -> None:
        try:
            while True:
                self._follow(json.loads(self._launcher.recv_bytes()))
        except (EOFError, OSError):
            os._exit(1)  # nobody is left to decide; the kernel is about to say the same

    def _follow(self, order: dict[str, Any]) -> None:
        self.leaving = order.pop("leaving", self.leaving)
        match order.pop("do"):
            case "break" if order["at_once"]:
                self._broken = max(self._broken, order["generation"])
                if self._interruption is not None and self._broken >= self._generation:
                    self._interruption.interrupt()
            case "break":
                self._wanted = max(self._wanted, order["generation"])
            case "place":
                identity = Identity(**order.pop("identity"))
                shares = order.pop("shares")
                self._places.put(
                    Place(identity=identity, shares=None if shares is None else tuple(shares), **order)
                )
            case "release":
                self._places.put(None)

    def _on_notice(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Not from inside the handler: it may have interrupted a message of this very thread.
        threading.Thread(target=self.tell, args=("leaving",), daemon=True).start()

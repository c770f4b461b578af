"""Where a server meets its trainers: pushes come in on the threads of calls, and the server's own thread answers them.

A call waits until its push is answered. When the group breaks every call is let go without an answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline import remote
from paceline.world.interruption import InterruptedWaitError, Interruption

Content = dict[str, Any]
_desk: PushQueue | None = None


@dataclass(eq=False)
class Push:
    """What one trainer brings in one step."""

    trainer: int
    step: int
    content: Content
    answer: Content | None = None


class PushQueue:
    """One server's pushes that wait, and those that wait for an answer."""

    def __init__(self, weights: Callable[[], dict[str, Tensor]], interruption: Interruption) -> None:
        global _desk  # noqa: PLW0603  (as torch's RPC, which is one a process)
        self.weights = weights
        self._waiting: list[Push] = []
        self._changed = threading.Condition()
        self._open = True
        self._interruption = interruption
        _desk = self
        interruption.on_raise(self.close)

    def bring(self, push: Push) -> Content | None:
        """Put a push down and wait for the answer; None when there will be none."""
        with self._changed:
            self._waiting.append(push)
            self._changed.notify_all()
            while push.answer is None and self._open:
                self._changed.wait()
            return push.answer

    def take(self, count: int) -> list[Push]:
        """Return all pushes that wait, as soon as there are so many, by trainer."""
        with self._changed:
            while len(self._waiting) < count:
                if not self._open:
                    raise InterruptedWaitError("the group is broken: a trainer was lost, or has left")
                self._interruption.await_change(self._changed)
            taken, self._waiting = self._waiting, []
        return sorted(taken, key=lambda push: push.trainer)

    def answer(self, pushes: Sequence[Push], content: Content) -> None:
        """Let trainers go on with this."""
        with self._changed:
            for push in pushes:
                push.answer = content
            self._changed.notify_all()

    def close(self) -> None:
        """Let everybody go: the group is broken."""
        with self._changed:
            self._open = False
            self._changed.notify_all()


@remote.function
def push(trainer: int, step: int, content: Content) -> Content | None:
    """Bring a trainer's gradients, and give the weights that come of them; None where the group is broken."""
    return None if _desk is None else _desk.bring(Push(trainer, step, content))


@remote.function
def pull() -> dict[str, Tensor] | None:
    """Return all that this server holds of the model, by name."""
    return None if _desk is None else _desk.weights()


@remote.function
def leave() -> None:
    """Notify a server that a trainer leaves the group, which is broken by that."""
    if _desk is not None:
        _desk.close()

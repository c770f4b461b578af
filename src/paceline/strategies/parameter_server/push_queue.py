"""Where a server meets its trainers: pushes come in on the threads of calls, and the server's own thread answers them.

A call waits until its push is answered, or ends without an answer when the group breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from paceline import remote
from paceline.state.optimizer_state import Options
from paceline.strategies.server_calls import Service
from paceline.world.interruption import Interruption

Content = dict[str, Any]


@dataclass(eq=False)
class Push:
    """What one trainer brings in one step."""

    trainer: int
    step: int
    content: Content
    answer: Content | None = None


class PushQueue(Service):
    """The pushes that wait on one server, and the trainers that wait for its answer."""

    current: ClassVar[PushQueue | None] = None

    def __init__(
        self, held: Callable[[], tuple[dict[str, Tensor], Options]], interruption: Interruption
    ) -> None:
        super().__init__(interruption)
        self.held = held
        self._waiting: list[Push] = []

    def bring(self, push: Push) -> Content | None:
        """Put a push down and wait for the answer; None when there will be none."""
        with self._changed:
            self._waiting.append(push)
            self._changed.notify_all()
            self._changed.wait_for(lambda: push.answer is not None or not self._open)
            return push.answer

    def take(self, count: int) -> list[Push]:
        """Return all pushes that wait, as soon as there are so many, by trainer."""
        with self._changed:
            self._wait(lambda: len(self._waiting) >= count)
            taken, self._waiting = self._waiting, []
        return sorted(taken, key=lambda push: push.trainer)

    def answer(self, pushes: Sequence[Push], content: Content) -> None:
        """Answer trainers, who go on with this."""
        with self._changed:
            for push in pushes:
                push.answer = content
            self._changed.notify_all()


@remote.function
def push(trainer: int, step: int, content: Content) -> Content | None:
    """Bring a trainer's gradients, and give the weights that come of them; None where the group is broken."""
    return None if PushQueue.current is None else PushQueue.current.bring(Push(trainer, step, content))


@remote.function
def pull() -> tuple[dict[str, Tensor], Options] | None:
    """Return this server's part of the model, by name, and the optimizer options that its step changes."""
    return None if PushQueue.current is None else PushQueue.current.held()

"""Where a server's calls come in: rows are given out, gradients and the commit of a step are taken.

Trainers and servers count the same turns: one when a step begins, one when it is applied, one for each evaluation. A call
names its turn and waits until the server has come to it, so no row is read before all that came earlier is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline import remote
from paceline.reduce.tree import Subtree
from paceline.state.optimizer_state import Options
from paceline.strategies.server_calls import Service
from paceline.strategies.sharded import LocalPart
from paceline.world.interruption import InterruptedWaitError, Interruption

Sent = list[tuple[Subtree, list[tuple[Tensor, Tensor] | None]]]
"""A trainer's subtrees with, for each table, row numbers and values; None where the table had no part in it."""
Norms = list[Tensor | None]
GRACE_S = 1.0
"""How long a server that has everything waits for the commit of a step, once the group is broken: the trainers that are left
give it, if any of them has got so far."""


@dataclass(frozen=True)
class Commit:
    """The commit of the two-phase update: every server has everybody's gradients, and is to apply them."""

    factor: float
    entry: Tensor
    norm: Tensor | None
    options: Options
    """What servers update with: their loops have no batches, and not all weights to compute options from."""


class EmbeddingService(Service):
    """One server's side of the calls."""

    current: ClassVar[EmbeddingService | None] = None

    def __init__(self, parts: Sequence[LocalPart], trainers: int, interruption: Interruption) -> None:
        super().__init__(interruption)
        self._parts, self._trainers = parts, trainers
        self._turn = 0
        self._brought: dict[int, Sent] = {}
        self._norms: tuple[int, Norms] = -1, []
        """Of which turn, and the norms. They stay when the turn ends: a call may be told of them after another trainer, who
        was quicker, has had the step applied."""
        self._commit: Commit | None = None
        self._missed = False
        """Whether the commit did not come in time: it comes to nothing from then on."""

    # On the server's own thread.

    def advance(self) -> None:
        """Come to the next turn."""
        with self._changed:
            self._turn += 1
            self._brought, self._commit = {}, None
            self._changed.notify_all()

    def collect(self) -> list[Sent]:
        """Wait for everybody's gradients; gives them by trainer."""
        with self._changed:
            self._wait(lambda: len(self._brought) == self._trainers)
            return [self._brought[trainer] for trainer in range(self._trainers)]

    def confirm(self, norms: Norms) -> Commit:
        """Report to the trainers that everything has arrived, and wait for their commit."""
        with self._changed:
            self._norms = self._turn, norms
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._commit is not None or not self._open)
            self._changed.wait_for(lambda: self._commit is not None, timeout=GRACE_S)
            self._missed = self._commit is None
            if self._commit is None:
                raise InterruptedWaitError("the group is broken: no trainer has committed this step")
            return self._commit

    # On the threads of calls; None is no answer, because the group is broken.

    def lookup(self, turn: int, table: int, rows: Tensor) -> Tensor | None:
        """Return rows of a table, once the server has come to the turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn >= turn or not self._open)
            if not self._open:
                return None
        values = self._parts[table].values.detach()
        return values.index_select(0, rows.to(values.device)).cpu()

    def push(self, turn: int, trainer: int, sent: Sent) -> Norms | None:
        """Accept a trainer's gradients; return the norms of all touched rows once every trainer's have arrived."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn >= turn or not self._open)
            self._brought[trainer] = sent
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._norms[0] == turn or not self._open)
            answered, norms = self._norms
            return norms if answered == turn else None

    def apply(self, turn: int, commit: Commit) -> bool | None:
        """Commit the step; several trainers send the same."""
        with self._changed:
            if self._missed:
                return None
            if turn == self._turn:
                self._commit = commit
                self._changed.notify_all()
            return True


@remote.function
def lookup(turn: int, table: int, rows: Tensor) -> Tensor | None:
    """Return rows of a table."""
    return None if EmbeddingService.current is None else EmbeddingService.current.lookup(turn, table, rows)


@remote.function
def push(turn: int, trainer: int, sent: Sent) -> Norms | None:
    """Bring gradients."""
    return None if EmbeddingService.current is None else EmbeddingService.current.push(turn, trainer, sent)


@remote.function
def apply(turn: int, factor: float, entry: Tensor, norm: Tensor | None, options: Options) -> bool | None:
    """Commit a step."""
    return (
        None
        if EmbeddingService.current is None
        else EmbeddingService.current.apply(turn, Commit(factor, entry, norm, options))
    )

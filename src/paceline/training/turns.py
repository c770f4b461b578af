"""The turns of one call of `run.steps`: which optimizer a step is for, and how many steps are taken with one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from paceline.data import ShardedLoader
from paceline.errors import InputError, UnknownNameError
from paceline.recovery.position import Position
from paceline.strategies.in_turns.optimizers import Optimizers

KEY = "turns"
"""Where a checkpoint's facts hold those of the call that it was saved in."""


@dataclass(frozen=True)
class TurnOrder:
    """The order of the turns; none: every step is for all optimizers."""

    names: tuple[str, ...] = ()
    fresh: bool = False
    """Whether each turn has a batch of its own; else one batch goes through all turns."""

    @property
    def repeats(self) -> int:
        """How many steps in a row are taken with each batch."""
        return 1 if self.fresh else max(1, len(self.names))

    @property
    def told(self) -> list[str]:
        """What a checkpoint says of them."""
        return [*self.names, *(["(fresh batches)"] if self.fresh else [])]

    def at(self, position: Position) -> str | None:
        """Return whose turn the step at a position is."""
        if not self.names:
            return None
        # Over one batch by the place in the epoch, which is of whole rounds; else by the steps of the call, so that an epoch
        # that is no multiple of a round breaks none.
        place = position.number - position.first_number if self.fresh else position.step
        return self.names[place % len(self.names)]


def check_turns(meta: dict[str, Any], turns: TurnOrder, at: Position, phase: int) -> None:
    """Refuse other turns than a call of `run.steps` was begun with: its batches would be others; note them for checkpoints."""
    then: list[str] = meta.get(KEY, [])
    if at.phase == phase and at.number > at.first_number and then != turns.told:
        raise InputError(
            f"this run was saved in a call of run.steps with {_said(then)}, and now it has {_said(turns.told)}: the result would "
            "differ. Give the same turns."
        )
    if turns.names or KEY in meta:
        meta[KEY] = turns.told


def check_repeats(loader: ShardedLoader, turns: TurnOrder) -> None:
    """Refuse data that cannot be given once for every turn."""
    if turns.repeats > 1 and loader.in_parts:
        raise InputError(
            "paceline.data.Parts gives each batch once, and turns take it several times. Say fresh_batches=True, or give a "
            "stream or a map-style data set."
        )


def _said(told: list[str]) -> str:
    return f"turns {', '.join(told)}" if told else "no turns"


def read_turns(turns: Sequence[str], optimizer: Optimizer, *, fresh: bool) -> TurnOrder:
    """Return the turns that a call of `run.steps` names, or refuse names that no optimizer has."""
    if isinstance(turns, str):
        raise InputError(f"turns={turns!r} is one name. Give the order of all: turns=({turns!r}, ...).")
    names = tuple(turns)
    if fresh and not names:
        raise InputError(
            'fresh_batches=True says which batch each turn has, and no turns were given. Give them: turns=("critic", "actor").'
        )
    known = list(optimizer.optimizers) if isinstance(optimizer, Optimizers) else []
    if names and not known:
        raise InputError(
            "turns are taken by several optimizers, and this run has one. Prepare them by name: "
            'run.prepare({"generator": g, "discriminator": d}, {"generator": opt_g, "discriminator": opt_d}).'
        )
    for name in names:
        if name not in known:
            raise UnknownNameError("turn", name, known)
    return TurnOrder(names, fresh)

"""What is wanted of a watched run beside its record. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.verify.proof.record import Dump


@dataclass(frozen=True, kw_only=True)
class Watching:
    """What else is wanted of a run."""

    epochs: int | None = None
    """What a schedule is laid out for."""
    until: int | None = None
    """End after this step; the schedule is laid out as for the whole."""
    dump: Dump | None = None
    order: bool = False
    """Whether to note in which order the modules run."""
    evaluate: bool = False
    trace: int | None = None
    """The step whose every operation is to be written down."""

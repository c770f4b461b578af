"""Named points of a run at which a fault can be set off, to prove that it is survived.

`hit("backward")` does nothing unless somebody has set a trap, and then calls it with the name. It costs 50 ns.
"""

from __future__ import annotations

from collections.abc import Callable

DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
REDUCTION = "reduction"
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint"
REGROUP = "regroup"
EVALUATION = "evaluation"
STEP_POINTS = (DATA, FORWARD, BACKWARD, REDUCTION, OPTIMIZER)
"""Those that come in every step."""
POINTS = (*STEP_POINTS, CHECKPOINT, REGROUP, EVALUATION)

_trap: Callable[[str], None] | None = None


def hit(name: str) -> None:
    """Call the trap, if one is set, with the name of this fault point."""
    if _trap is not None:
        _trap(name)


def set_fault(trap: Callable[[str], None] | None) -> None:
    """Set the function that is called with the name of every fault point reached; None removes it."""
    global _trap  # noqa: PLW0603  (one a process, as the points are)
    _trap = trap

"""Whether all workers have called the same thing: what they do together would wait for ever for one that does not."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.distributed import DistError

from paceline.errors import InputError
from paceline.world import World
from paceline.world.base import Comm
from paceline.world.words import NEVER, forget, hear, tell

SLACK = 0.8
"""Waited for less long than a verdict on a hang takes: a strategy that gathers weights in the forward pass waits there for this
worker, and would be judged to hang, where whoever calls alone is at fault."""
_calls: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()
"""How many calls this worker has made with each group; the same on all of them as long as they stay together."""


def check_same_call(world: World, called: str) -> None:
    """Wait until all workers have made the same call, or raise with the names of the calls.

    Others may be in their next step and wait for this worker there, so no collective may be used.
    """
    _calls[world.comm] = turn = _calls.get(world.comm, 0) + 1
    mine = f"rank {world.rank} called {called}()"

    def late(rank: int, when: str) -> InputError:
        slow = "" if when == NEVER else " Where that worker is only slow, raise the hang timeout."
        return InputError(
            f"{mine}, and rank {rank} has not {when}. All workers must call it, at the same place of the loop: "
            f"take it out of `if run.world.is_first`, and print there.{slow}"
        )

    try:
        tell(world, f"met/{turn}", called)
        for rank, theirs in hear(world, f"met/{turn}", late, SLACK):
            if theirs != called:
                raise InputError(
                    f"{mine}, and rank {rank} {theirs}(). All workers must call the same in the same order."
                )
        forget(world, f"met/{turn - 1}")  # all have come to this turn, so all have heard the one before
    except DistError:
        world.interruption.check()  # else the store is gone: those who train together can do without it

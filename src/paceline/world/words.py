"""What workers tell each other through the store in which they met, where some may wait in a collective for whoever asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.errors import PacelineError
from paceline.world.interruption import InterruptedWaitError
from paceline.world.status_page import Phase
from paceline.world.world import World

SLACK = 1.25
"""Waited for longer than a verdict on a hang takes: one that is slow or stuck is judged as ever, and then this wait is broken."""
_POLL_S = 0.002
NEVER = "and never will: its function has ended"
"""When one says nothing that has nothing more to say."""


def tell(world: World, key: str, word: str) -> None:
    """Leave a word for the others."""
    store = _store(world)
    if store is not None:
        store.set(f"{key}/{world.rank}", word)


def say_farewell(world: World) -> None:
    """Publish that this worker leaves the group, for those that wait for a word of it; calling it twice is fine."""
    with suppress(DistError, InterruptedWaitError, PacelineError):
        store = _store(world)
        if store is not None:
            store.set(_farewell(world), "")


def say_returned(world: World) -> None:
    """Publish that this worker's function has ended, for those that wait for a word of it."""
    with suppress(DistError, InterruptedWaitError, PacelineError):
        tell(world, _returned(world), "")


def hear(
    world: World, key: str, late: Callable[[int, str], Exception], slack: float = SLACK
) -> Iterator[tuple[int, str]]:
    """Yield each rank and its word, when it is there.

    Where one says nothing, though nobody is judged to hang, it waits for this worker in a collective, or its function has ended:
    `late` makes the error from its rank and when it had said nothing yet. Where one has left the group, the group is broken.
    """
    store = _store(world)
    if store is None:
        return
    before = world.status_page.enter(Phase.COMMUNICATION)
    limit_s = slack * (1 + world.apart) * world.status_page.limit_s
    limit = time.monotonic() + limit_s
    try:
        for rank in range(world.size):
            while not store.check([f"{key}/{rank}"]):
                if store.check([_farewell(world)]):
                    world.interruption.interrupt()
                world.interruption.check()
                world.status_page.touch()
                if store.check([f"{_returned(world)}/{rank}"]) and not store.check([f"{key}/{rank}"]):
                    raise late(rank, NEVER)
                if time.monotonic() > limit:
                    raise late(rank, f"{limit_s:g} s later")
                time.sleep(_POLL_S)
            yield rank, store.get(f"{key}/{rank}").decode()
    finally:
        world.status_page.enter(before)


def heard(world: World, key: str, ranks: Iterable[int] = ()) -> Iterator[tuple[int, str]]:
    """Yield each rank, of these or of all, whose word is there already, and the word."""
    store = _store(world)
    if store is None:
        return
    for rank in ranks or range(world.size):
        if store.check([f"{key}/{rank}"]):
            yield rank, store.get(f"{key}/{rank}").decode()


def forget(world: World, key: str) -> None:
    """Delete this worker's word, which nobody will ask for any more: the store lives as long as the launch."""
    store = _store(world)
    if store is not None:
        store.delete_key(f"{key}/{world.rank}")


def leave_first(world: World, key: str, word: str) -> str:
    """Leave a word where no other has left one yet; return the one that is there."""
    store = _store(world)
    return word if store is None else store.compare_set(key, "", word).decode()


def take_back(world: World, key: str) -> None:
    """Delete the word that was left first."""
    store = _store(world)
    if store is not None:
        store.delete_key(key)


def _farewell(world: World) -> str:
    return f"farewell/{world.generation}"


def _returned(world: World) -> str:
    return f"returned/{world.generation}"


def _store(world: World) -> Store | None:
    """Return the part of the store that is this group's alone: groups split from one another share the store, not the words."""
    if world.size == 1 or world.store is None:
        return None
    group = world.comm.group
    return world.store if group is None else PrefixStore(group.group_name, world.store)

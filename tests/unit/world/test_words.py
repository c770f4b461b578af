"""Workers hear each other's words for as long as nobody is judged to hang, and not longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from paceline.launch.health.diagnosis import HangWatch
from paceline.transport.store import RunStore
from paceline.transport.store_server import StoreServer
from paceline.world import Identity, World, connect
from paceline.world.interruption import InterruptedWaitError
from paceline.world.status_page import OperationKind, Phase, StatusPage, StatusPageReader
from paceline.world.words import forget, hear, heard, say_returned, tell

ALONE = Identity(rank=0, size=1, local_rank=0, local_size=1)


class LateError(Exception):
    """What the one who waits raises."""


@contextmanager
def pair(timeout_s: float) -> Iterator[tuple[World, World, StatusPageReader]]:
    page = StatusPage.create()
    status_page, reader = StatusPage(page), StatusPageReader(page)
    status_page.timeout_s = timeout_s
    status_page.begin(OperationKind.STEP, 0)
    status_page.end()
    alone = connect(ALONE, device="cpu", status_page=status_page)
    first = replace(alone, size=2, store=HashStore())
    yield first, replace(first, rank=1), reader
    alone.close()


def test_one_that_is_slow_is_waited_for_and_nobody_seems_to_hang() -> None:
    with pair(timeout_s=1.0) as (first, second, reader):
        watch, overdue = HangWatch(1.0), []

        def work() -> None:
            for _ in range(9):
                time.sleep(0.13)
                overdue.append(watch.overdue({0: reader.read()}, time.monotonic()))
            tell(second, "here", "b")

        slow = threading.Thread(target=work)
        slow.start()
        tell(first, "here", "a")
        assert list(hear(first, "here", lambda *_: LateError(), slack=9.0)) == [(0, "a"), (1, "b")]
        slow.join()
        assert overdue == [False] * 9
        assert reader.read().phase is Phase.IDLE


def test_one_that_says_nothing_and_is_not_judged_is_named() -> None:
    with pair(timeout_s=0.1) as (first, _, _):
        tell(first, "here", "a")
        with pytest.raises(LateError, match=r"1 not 0\.125 s later"):
            list(hear(first, "here", lambda rank, when: LateError(f"{rank} not {when}")))


def test_one_whose_function_has_ended_is_not_waited_for() -> None:
    with pair(timeout_s=60) as (first, second, _):
        tell(first, "here", "a")
        tell(second, "here", "b")
        say_returned(second)
        assert list(hear(first, "here", lambda *_: LateError())) == [(0, "a"), (1, "b")]
        tell(first, "there", "a")
        with pytest.raises(LateError, match="1 not and never will: its function has ended"):
            list(hear(first, "there", lambda rank, when: LateError(f"{rank} not {when}")))


def test_a_group_that_breaks_ends_the_wait() -> None:
    with pair(timeout_s=60) as (first, _, _):
        first.interruption.interrupt()
        with pytest.raises(InterruptedWaitError):
            list(hear(first, "here", lambda *_: LateError()))


def test_one_that_may_be_steps_behind_is_waited_for_as_many_times_as_long() -> None:
    with pair(0.2) as (mine, theirs, _):
        late = threading.Timer(0.6, tell, (theirs, "key", "word"))
        late.start()
        tell(mine, "key", "word")
        heard = list(hear(replace(mine, apart=9), "key", lambda *_: LateError()))
        late.join()
    assert heard == [(0, "word"), (1, "word")]


def test_what_was_told_is_seen_at_once_and_can_be_forgotten(tmp_path: Path) -> None:
    """Also in a group that has formed anew, whose store is one of ours behind torch's."""
    server = StoreServer(f"ipc://{tmp_path}/store")
    kept = RunStore(server.address)
    store = kept.for_group(timeout_s=5.0, timed_out=InterruptedWaitError)
    with closing(server), pair(1.0) as (first, second, _):
        placed = PrefixStore("group", store)
        mine, theirs = replace(first, store=placed), replace(second, store=placed)
        assert list(heard(mine, "key")) == []
        tell(theirs, "key", "b")
        assert list(heard(mine, "key")) == [(1, "b")]
        forget(mine, "key")  # nobody else's
        assert list(heard(mine, "key")) == [(1, "b")]
        forget(theirs, "key")
        assert kept.num_keys() == 0

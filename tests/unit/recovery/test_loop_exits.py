"""Where each worker left a call of `run.steps` is known in every group that forms afterwards."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from paceline.errors import InputError
from paceline.recovery.loop_exits import LoopExits
from paceline.transport.secret import Secret
from paceline.transport.store import RunStore
from paceline.transport.store_server import StoreServer
from paceline.world import World
from paceline.world.interruption import InterruptedWaitError, Interruption, broken
from paceline.world.local import LocalComm
from paceline.world.status_page import NoStatusPage

_servers: list[StoreServer] = []


@pytest.fixture(autouse=True)
def serving() -> Iterator[None]:
    yield
    while _servers:
        _servers.pop().close()


def group(size: int) -> list[World]:
    """Return the worlds of workers that meet in a store of their own, whose waits end with the group."""
    secret = Secret.make()
    _servers.append(StoreServer("tcp://127.0.0.1:*", secret=secret))
    meeting = RunStore(_servers[-1].address, secret=secret)
    worlds = []
    for rank in range(size):
        status_page, interruption = NoStatusPage(), Interruption()
        status_page.timeout_s = 0.02
        store = meeting.for_group(timeout_s=5.0, timed_out=InterruptedWaitError)
        interruption.on_raise(functools.partial(store.interrupt, broken))
        worlds.append(
            World(
                rank=rank, size=size, local_rank=rank, local_size=size, node_rank=0, nodes=1, device=torch.device("cpu"),
                backend="gloo", generation=1, host="here", comm=LocalComm(), interruption=interruption, status_page=status_page,
                store=store,
            )
        )  # fmt: skip
    return worlds


def enter(size: int, *workers: LoopExits) -> list[World]:
    worlds = group(size)
    for one, world in zip(workers, worlds, strict=True):
        one.enter_group(world)
    return worlds


def test_one_that_has_heard_all_says_its_word_again_to_one_that_was_kept_from_hearing() -> None:
    first, second, lost = LoopExits(), LoopExits(), LoopExits()
    worlds = group(3)
    for one, world in zip((first, second, lost), worlds, strict=True):
        one.note(world, 0, 12, ended=True)
    first.check(worlds[0])
    assert not first.pending
    worlds[1].interruption.interrupt()
    with pytest.raises(InterruptedWaitError):
        second.check(worlds[1])
    assert second.pending
    for _ in range(2):  # a group may break before anybody has asked in it
        worlds = enter(2, first, second)
    first.check(worlds[0])
    first.begin()
    second.check(worlds[1])
    assert not second.pending
    # In the next call, in which both may be lost again.
    for one, world in zip((first, second), worlds, strict=True):
        one.begin()
        one.note(world, 1, 20, ended=True)
    second.check(worlds[1])
    worlds = enter(2, second, first)
    first.check(worlds[1])


def test_one_in_the_next_call_still_says_where_it_left_the_one_before() -> None:
    first, second = LoopExits(), LoopExits()
    worlds = group(2)
    for one, world in zip((first, second), worlds, strict=True):
        one.note(world, 0, 12, ended=True)
    first.check(worlds[0])
    first.begin()
    worlds = enter(2, first, second)
    second.check(worlds[1])


def test_a_run_that_has_gone_back_into_the_call_waits_for_nobody() -> None:
    survivor, newcomer = LoopExits(), LoopExits()
    worlds = group(2)
    survivor.note(worlds[0], 1, 12, ended=True)
    worlds[0].interruption.interrupt()
    with pytest.raises(InterruptedWaitError):
        survivor.check(worlds[0])
    survivor.go_back(1)
    assert not survivor.pending
    worlds = enter(2, survivor, newcomer)
    for one, world in zip((survivor, newcomer), worlds, strict=True):
        one.check(world)  # a checkpoint that is due at step 10
        one.check_present(world, 1, 12)
    for one, world in zip((survivor, newcomer), worlds, strict=True):
        one.note(world, 1, 12, ended=True)
    for one, world in zip((survivor, newcomer), worlds, strict=True):
        one.check(world)


def test_a_word_said_twice_of_one_call_is_there_for_the_slower() -> None:
    """A loop left with break, an evaluation behind it, and the end of the function, which notes it once more."""
    workers, worlds = (LoopExits(), LoopExits()), group(2)
    for _ in range(2):
        for one, world in zip(workers, worlds, strict=True):
            one.note(world, 0, 3, ended=True)
        for one, world in zip(workers, worlds, strict=True):
            one.check(world)


def test_another_step_is_found_in_the_next_group_too() -> None:
    workers = LoopExits(), LoopExits()
    for number, (one, world) in enumerate(zip(workers, group(2), strict=True), 3):
        one.note(world, 0, number, ended=False)
    worlds = enter(2, *workers)
    with pytest.raises(
        InputError, match=r"rank 0 left the loop of run\.steps after step 2, but rank 1 after step 3"
    ):
        workers[0].check(worlds[0])


def test_whoever_waits_in_the_loop_for_one_that_has_left_it_for_good_is_told_and_only_then() -> None:
    waits, slow, left = workers = LoopExits(), LoopExits(), LoopExits()
    worlds = enter(3, *workers)
    left.note(worlds[2], 0, 5, ended=False)
    waits.check_present(worlds[0], 0, 5, [2])  # it may yet hear that all left there
    with pytest.raises(InputError, match="has not"):
        left.check(worlds[2])
    waits.check_present(worlds[0], 0, 4, [2])  # it took part in that step
    waits.check_present(worlds[0], 0, 5, [1])  # one that is slow
    slow.note(worlds[1], 0, 5, ended=False)
    slow.check_present(worlds[1], 0, 5, [2])  # it has left at the same step
    with pytest.raises(InputError, match=r"rank 2 left the loop .* and rank 0 waits for it in step 5"):
        waits.check_present(worlds[0], 0, 5, [2])


def test_one_whose_data_ended_before_that_of_the_others_is_told_of_its_data() -> None:
    early, late = LoopExits(), LoopExits()
    worlds = enter(2, early, late)
    early.note(worlds[0], 0, 2, ended=True)
    whole = "and of a stream the whole on every worker"
    with pytest.raises(InputError, match=rf"rank 0 left the loop .* and rank 1 has not .*{whole}"):
        early.check(worlds[0])
    with pytest.raises(
        InputError, match=rf"rank 1 waits for it in step 2\. Its data or steps ended there: .*{whole}"
    ):
        late.check_present(worlds[1], 0, 2)
    late.note(worlds[1], 0, 3, ended=True)
    with pytest.raises(InputError, match=whole):
        late.check(worlds[1])

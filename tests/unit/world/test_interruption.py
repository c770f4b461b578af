"""What ends the waits of a group, and holds nothing of it afterwards."""

from __future__ import annotations

import weakref
from typing import NoReturn

import pytest

from paceline.world.interruption import Interruption


class Wait:
    """Something that waits for others."""

    ended = 0

    def end(self) -> None:
        Wait.ended += 1


def test_an_interruption_ends_every_wait_once_and_keeps_none_of_them() -> None:
    interruption, before, after = Interruption(), Wait(), Wait()
    held = [weakref.ref(before), weakref.ref(after)]
    interruption.on_raise(before.end)
    interruption.interrupt()
    interruption.interrupt()
    interruption.on_raise(after.end)
    assert Wait.ended == 2
    del before, after
    assert [one() for one in held] == [None, None]


def test_a_failed_message_is_outlived_only_where_its_step_is_discarded() -> None:
    interruption = Interruption()

    def fail() -> NoReturn:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        interruption.outlive(fail, lambda: 0)
    interruption.discards = lambda error: "gone" not in str(error)
    with pytest.raises(RuntimeError, match="gone"):
        interruption.outlive(fail, lambda: 0)
    interruption.discards = lambda _: True
    assert interruption.outlive(fail, lambda: 0) == 0
    assert interruption.outlive(lambda: 1, lambda: 0) == 1

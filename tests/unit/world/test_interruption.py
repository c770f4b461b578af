"""What ends the waits of a group, and holds nothing of it afterwards."""

from __future__ import annotations

import weakref

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

"""What Python's own interpreter does at its end, who called, and its generator where a library draws from it."""

from __future__ import annotations

import atexit
import dis
import random
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

frame = sys._getframe
"""Return the frame of the caller, or of one so many calls above."""
_UNPACKING = {dis.opmap["UNPACK_SEQUENCE"], dis.opmap["UNPACK_EX"]}
run_exit_functions = atexit._run_exitfuncs
"""Call what was registered with `atexit`, as the interpreter does at its end."""


def unpacks(caller: FrameType) -> bool:
    """Return whether what a frame is doing is `x, y = value`, also as `for x, y in values`, where it called `iter(value)`."""
    return caller.f_code.co_code[caller.f_lasti] in _UNPACKING


def end_interpreter() -> None:
    """Wait for threads that are no daemons and call what was registered with `atexit`: what the interpreter does last."""
    threading._shutdown()  # type: ignore[attr-defined]
    run_exit_functions()


def forget_finalizers() -> None:
    """Prevent the finalizers made so far from running when this process exits."""
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False


@contextmanager
def random_preserved() -> Iterator[None]:
    """Put the generator of `random` back afterwards to where it was before: `seeds.preserved` without torch."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)

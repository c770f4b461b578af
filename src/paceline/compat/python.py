"""What Python's own interpreter does at its end, and who called."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref

frame = sys._getframe
"""Return the frame of the caller, or of one so many calls above."""
run_exit_functions = atexit._run_exitfuncs
"""Call what was registered with `atexit`, as the interpreter does at its end."""


def end_interpreter() -> None:
    """Wait for threads that are no daemons and call what was registered with `atexit`: what the interpreter does last."""
    threading._shutdown()  # type: ignore[attr-defined]
    run_exit_functions()


def forget_finalizers() -> None:
    """Prevent the finalizers made so far from running when this process exits."""
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False

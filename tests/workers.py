"""Runs a function in real worker processes on gloo and gives the results by rank."""

from __future__ import annotations

import faulthandler
import tempfile
from collections.abc import Callable
from typing import Any

import paceline
from tests.patience import HANG_S

"""A worker that takes longer hangs: it prints where every thread stands, and exits."""


def run_workers(
    function: Callable[..., Any], workers: int, *args: Any, checked: bool = False, **kwargs: Any
) -> list[Any]:
    """Call the module-level `function(world, *args, **kwargs)` in each worker; raise what fails there."""
    call = {"function": function, "args": args, "kwargs": kwargs}
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as folder:
        results = paceline.launch(
            _work,
            workers=workers,
            threads=1,
            device="cpu",
            check_collectives=checked,
            out=folder,
            kwargs=call,
        )
    return list(results)


def _work(
    run: paceline.Run, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        return function(run.world, *args, **kwargs)
    finally:
        faulthandler.cancel_dump_traceback_later()

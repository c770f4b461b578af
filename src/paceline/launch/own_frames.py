"""How an InputError looks that a script does not catch: the script's own lines and the error, none of ours between them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import TracebackType

from paceline.errors import InputError

_OURS = (f"{Path(__file__).parents[1]}/", contextlib.__file__)
_hidden_by: list[object] = []


def hide_own_frames() -> None:
    """Have Python show it so from here on; any other exception is shown as before."""
    before = sys.excepthook
    if before in _hidden_by:
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, InputError):
            trace = without_own(trace)
            error = error.with_traceback(trace)
        before(kind, error, trace)

    _hidden_by[:] = [show]
    sys.excepthook = show


def without_own(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package."""
    if trace is None:
        return None
    rest = without_own(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_OURS):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)

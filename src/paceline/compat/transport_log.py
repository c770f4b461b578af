"""Keeps torch's transport from warning of every peer that parts, while all part.

It writes such lines from C++, at a level that can be set from outside only before torch is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import torch

_WARNING, _ERROR = 1, 2


def expect_partings() -> None:
    """Take it from now on that connections close."""
    _set_level(_ERROR)


def warn_of_partings() -> None:
    """Listen for connections that close."""
    _set_level(_WARNING)


def _set_level(level: int) -> None:
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    # A build that logs otherwise says a few words too many.
    with contextlib.suppress(OSError, ValueError):
        found = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
        if found.value in (_WARNING, _ERROR):  # else the user has chosen by TORCH_CPP_LOG_LEVEL
            found.value = level

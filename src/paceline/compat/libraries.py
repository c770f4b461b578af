"""Tells Python's own modules and installed packages from the user's code, by the folder that they lie in."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from pathlib import Path

_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""How folders of installed packages are called: an environment's, the user's own site, Debian's."""


@cache
def is_library(folder: str) -> bool:
    """Return whether a folder is Python's own, or of installed packages; links are followed."""
    there = Path(folder).resolve()
    return not _INSTALLED.isdisjoint(there.parts) or any(map(there.is_relative_to, _of_python()))


@cache
def _of_python() -> tuple[Path, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_path(kind) for kind in kinds} | {str(Path(os.__file__).parent)}
    return tuple(Path(one).resolve() for one in sorted(found))

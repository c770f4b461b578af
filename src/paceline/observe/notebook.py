"""Whether this process is the kernel of a notebook, and an output of the cell that runs."""

from __future__ import annotations

import sys
from typing import Any


class Cell:
    """One output, which is replaced as often as something else is to be seen in it."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._shown: str | None = None

    def show(self, text: str) -> None:
        """Show text in place of what is there."""
        if text == self._shown or not (text or self._shown):
            return
        self._shown = text
        data = {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def display() -> Cell | None:
    """Return an output of the cell that runs; None where this process is no kernel, or no cell runs."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display as show

    shell: Any = get_ipython()
    return None if getattr(shell, "kernel", None) is None else Cell(show)

"""One process that a launcher has started, and everything that connects the two."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from paceline.world.status_page import StatusPageReader

_CHUNK = 1 << 16


@dataclass
class Process:
    """A worker, or one that serves the workers."""

    number: int
    ticket: int
    """By which the fork server reports its start."""
    pid: int | None = None
    status: int | None = None
    control: Connection | None = field(default=None, repr=False)
    log: Path | None = None
    local_rank: int = 0
    open_pipes: int = 0
    status_page: StatusPageReader | None = field(default=None, repr=False)
    stacks: int = -1

    def pipe(self, selector: selectors.BaseSelector, receive: Callable[[bytes], None]) -> int:
        """Make a pipe whose bytes go to `receive`, and give its writing end."""
        read, write = os.pipe()

        def on_readable() -> None:
            chunk = os.read(read, _CHUNK)
            if chunk:
                receive(chunk)
            else:
                selector.unregister(read)
                os.close(read)
                self.open_pipes -= 1

        self.open_pipes += 1
        selector.register(read, selectors.EVENT_READ, (on_readable, self))
        return write

    def release(self, selector: selectors.BaseSelector) -> None:
        """Read what is left without waiting for more, and close everything."""
        for key in list(selector.get_map().values()):
            if isinstance(key.data, tuple) and key.data[1] is self and isinstance(key.fileobj, int):
                os.set_blocking(key.fileobj, False)
                with contextlib.suppress(BlockingIOError):
                    while key.fd in selector.get_map():
                        key.data[0]()
                if key.fd in selector.get_map():
                    selector.unregister(key.fileobj)
                    os.close(key.fileobj)
        if self.control is not None:
            selector.unregister(self.control)
            self.control.close()
            self.control = None
        if self.status_page is not None:
            self.status_page.close()
            os.close(self.stacks)
            self.status_page = None

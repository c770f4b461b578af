"""Takes connections also where no more files may be opened: else whoever waits there would keep the loop awake for ever."""

from __future__ import annotations

import contextlib
import errno
import os
import socket


class Acceptor:
    """A socket that listens, and a descriptor that is given up for a moment to turn somebody away."""

    def __init__(self, listening: socket.socket) -> None:
        """Take over a socket, which may be bound later."""
        self.socket = listening
        self.socket.setblocking(False)
        try:
            self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            listening.close()
            raise

    def accept(self) -> socket.socket | None:
        """Return the next connection; None where there is none any more, or it was turned away."""
        try:
            return self.socket.accept()[0]
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return None  # whoever called has gone again
        self._give_up_spare()
        with contextlib.suppress(OSError):
            self.socket.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)
        return None

    def close(self) -> None:
        """Listen no more."""
        self._give_up_spare()
        self.socket.close()

    def _give_up_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)

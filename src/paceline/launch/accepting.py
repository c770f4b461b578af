"""Takes connections also where no more files may be opened: else whoever waits there would keep the loop awake for ever."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

PAUSE_S = 0.05
"""How long nobody is listened to where nobody can be taken or turned away: the loop that asks would find the same at once."""


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
        self._hold_spare()
        try:
            return self.socket.accept()[0]
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return None  # whoever called has gone again
        if self._spare is None:
            time.sleep(PAUSE_S)
            return None
        self._give_up_spare()
        with contextlib.suppress(OSError):
            self.socket.accept()[0].close()
        self._hold_spare()
        return None

    def close(self) -> None:
        """Listen no more."""
        self._give_up_spare()
        self.socket.close()

    def _hold_spare(self) -> None:
        """Have a descriptor to give up; another thread may have opened a file in its place."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def _give_up_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)

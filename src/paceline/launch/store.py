"""The meeting point of a run: torch's TCPStore, in a process of its own so that any worker may die."""

from __future__ import annotations

import signal
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.world.interfaces import family

if TYPE_CHECKING:
    from paceline.launch.workers.context import Worker


@dataclass(frozen=True)
class ServeStore:
    """Serve the store on a socket the launcher has bound already, so that no port is ever raced for."""

    host: str
    port: int

    def __call__(self, worker: Worker) -> None:
        """Serve until killed."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # A batch system may signal all processes of a job: this one serves until the launcher ends it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        listening = worker.extra
        if listening is None:
            raise RuntimeError("the store needs the socket that it listens on")
        store = TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening,
            use_libuv=True,
        )
        threading.Event().wait()
        del store


def listen(host: str) -> socket.socket:
    """Bind a free port of `host` for the store."""
    listening = socket.create_server((host, 0), family=family(host), backlog=1024)
    listening.setblocking(False)
    return listening

"""Where the workers of a run meet: the store that the launcher serves, and a port for scripts that meet by themselves."""

from __future__ import annotations

import socket

from paceline.transport.addresses import at
from paceline.transport.runtime_folder import RuntimeFolder
from paceline.transport.secret import Secret
from paceline.transport.store_server import StoreServer
from paceline.world import ended
from paceline.world.interfaces import family


class MeetingPoint:
    """One store for the groups of one start of all workers, and one port of torch's for a script's own group."""

    def __init__(self, host: str, folder: RuntimeFolder, secret: Secret | None, port: int = 0) -> None:
        """Serve the store in a folder that only this user may enter; with a secret, to other machines, on a port of `host`.

        `port` is for scripts; 0 takes a free one.
        """
        self._reserved = _reserve(host, port)
        self.port = int(self._reserved.getsockname()[1])
        """Nobody listens there: rank 0 of a script that calls `init_process_group` does."""
        address = folder.address("store") if secret is None else f"tcp://{at(host, '*')}"
        try:
            self._server = StoreServer(address, secret=secret)
        except OSError:
            self._reserved.close()
            raise
        self._remote_port = None if secret is None else self._server.address.rpartition(":")[2]

    def address(self, host: str) -> str:
        """Return where workers reach the store that reach this machine as `host`."""
        return self._server.address if self._remote_port is None else f"tcp://{at(host, self._remote_port)}"

    def note_ended(self, rank: int, host: str) -> None:
        """Tell workers that wait for this one in a call of theirs."""
        self._server.set(ended.KEY, ended.word(rank, host))

    def close(self) -> None:
        """Stop serving, and release the port."""
        self._server.close()
        self._reserved.close()


def _reserve(host: str, port: int) -> socket.socket:
    """Bind a port without listening: Linux lets another socket that says SO_REUSEADDR, as torch's does, bind it too."""
    reserved = socket.socket(family(host), socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
    except OSError:
        reserved.close()
        raise
    return reserved

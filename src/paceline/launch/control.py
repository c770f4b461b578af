"""Takes orders for a run in progress: a socket that only this user can reach, named in the run folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.documents import fits, read_object
from paceline.errors import InputError
from paceline.launch.accepting import Acceptor
from paceline.transport.runtime_folder import RuntimeFolder
from paceline.world import env

NAME = "launcher.json"
_LONGEST = 4096
_UNREADABLE = (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""What an order can raise that is not understood: whatever somebody sends must not end the run."""
Answer = Callable[[dict[str, Any]], str]


class ControlSocket:
    """The launcher's end: each connection sends one order and receives one line."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        self._answer = answer
        with contextlib.ExitStack() as undone:
            # Not in the run folder itself: the path of a socket is at most 107 characters long.
            home = RuntimeFolder()
            undone.callback(home.close)
            self._acceptor = Acceptor(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            undone.callback(self._acceptor.close)
            place = str(home.path / "socket")
            self._acceptor.socket.bind(place)
            self._acceptor.socket.listen()
            undone.callback(_name(folder, "socket", place))
            self._undone = undone.pop_all()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when an order comes."""
        return self._acceptor.socket.fileno()

    def serve(self) -> None:
        """Take one order."""
        connection = self._acceptor.accept()
        if connection is None:
            return
        with connection:
            connection.settimeout(1.0)
            try:
                order = json.loads(connection.recv(_LONGEST))
                reply = {"ok": True, "said": self._answer(order)}
            except InputError as error:
                reply = {"ok": False, "said": str(error)}
            except _UNREADABLE as error:
                reply = {"ok": False, "said": f"the order could not be read: {error}"}
            with contextlib.suppress(OSError):  # whoever asked may be gone
                connection.sendall(json.dumps(reply).encode() + b"\n")

    def close(self) -> None:
        """Take no more orders."""
        self._undone.close()


@contextlib.contextmanager
def owned(folder: Path, starter: str) -> Iterator[None]:
    """Name in the run folder who has started the workers, as long as they work: whoever it is, it takes no orders of ours."""
    with contextlib.ExitStack() as undone:
        undone.callback(_name(folder, "started_by", starter))
        yield


def _name(folder: Path, name: str, value: str) -> Callable[[], None]:
    """Write who has the workers of a run; return what removes that again."""
    record, partial = folder / NAME, folder / f".{NAME}.partial"
    text = json.dumps({"pid": os.getpid(), "host": env.host(), name: value}) + "\n"
    partial.write_text(text)
    partial.replace(record)

    def remove() -> None:
        with contextlib.suppress(OSError):
            if record.read_text() == text:  # not that of a launch that came after
                record.unlink()

    return remove


def in_progress(folder: Path) -> dict[str, Any] | None:
    """Return what the launcher of a run in progress says of itself; None where there is none, or it was killed here."""
    try:
        found = read_object(folder / NAME)
    except (OSError, ValueError):
        return None
    pid = found.get("pid")
    # Others may have written it, and it is shown; 0 and below are no process.
    words = (found.get("host"), found.get("started_by", ""))
    if (
        not isinstance(pid, int)
        or not fits(pid, int)
        or pid <= 0
        or not all(isinstance(one, str) and one.isprintable() for one in words)
    ):
        return None
    if found["host"] == env.host():
        try:
            os.kill(pid, 0)
        except PermissionError:
            return found
        except (OSError, OverflowError):
            return None
    return found


def order(folder: Path, request: dict[str, Any]) -> str:
    """Send an order to the launcher of the run in `folder`, and return its answer."""
    found = in_progress(folder)
    if found is None:
        raise InputError(
            f"no run is in progress in {folder}. Give the --out folder of one, on the machine it was launched on."
        )
    if "started_by" in found:
        raise InputError(
            f"the workers of {folder} were started by {found['started_by']}, which owns them, so they take no orders. End them "
            "there (Ctrl-C, SIGTERM or scancel), and start the run again with --resume, on as many workers as you like."
        )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10.0)
            connection.connect(found["socket"])
            connection.sendall(json.dumps(request).encode())
            reply = json.loads(connection.makefile().readline())
            done, said = reply["ok"], str(reply["said"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(
            f"the launcher of {folder} does not answer ({error!r}). It has ended, or runs on another machine."
        ) from None
    if not done:
        raise InputError(said)
    return said

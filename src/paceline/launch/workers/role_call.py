"""What a worker of a role runs: it meets the others, does its part, and serves calls until they have done theirs."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from paceline.launch.job import FunctionCall
from paceline.remote.names import Roles

if TYPE_CHECKING:
    from paceline.launch.workers.context import Worker
    from paceline.remote.session import Session

MODULES = ("paceline.remote.joining",)
"""What every such worker imports, and so is imported once for all."""


@dataclass(frozen=True, kw_only=True)
class RoleCall:
    """Call the function of this worker's role as `function(session, *args, **kwargs)`."""

    roles: Roles
    calls: tuple[FunctionCall | None, ...]
    """By role; None for one that only serves."""
    interface: str
    timeout_s: float
    secret: bytes | None = field(default=None, repr=False)
    """None where the launcher tells it in the environment."""

    def __call__(self, worker: Worker) -> Any:
        """Import what all roles run, meet the others, and do this role's part."""
        from paceline.remote.joining import enter

        # Every worker knows what any of them has registered: a server runs classes that only trainers name.
        notes: list[str] = []
        functions = [None if call is None else call.resolve(notes.append) for call in self.calls]
        for text in dict.fromkeys(notes) if worker.identity.rank == 0 else ():
            print(f"note: {text}.", file=sys.stderr)  # noqa: T201
        index = self.roles.index(worker.identity.rank)
        function, call = functions[index], self.calls[index]
        with enter(
            worker.identity, self.roles, self.secret, interface=self.interface, timeout_s=self.timeout_s
        ) as session:
            if worker.launcher is not None:
                attend(worker.launcher, session)
            if function is None or call is None:
                return None
            bound, args, kwargs = call.arguments()
            return function(*bound, session, *args, **kwargs)


def attend(launcher: Connection, session: Session) -> None:
    """Wait until the launcher knows that all have met, and listen from now on for who is lost."""
    begun = threading.Event()

    def listen() -> None:
        try:
            while True:
                order = json.loads(launcher.recv_bytes())
                if order["do"] == "begin":
                    begun.set()
                elif order["do"] == "note_lost":
                    session.note_lost(session.roles.names[order["rank"]])
        except (EOFError, OSError):
            os._exit(1)  # nobody is left to decide; the kernel is about to say the same

    threading.Thread(target=listen, name="paceline-attendance", daemon=True).start()
    launcher.send_bytes(pickle.dumps(("met", None)))
    begun.wait()

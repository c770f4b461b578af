"""The launcher's handle on the process that keeps a machine in the rendezvous. No torch."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from paceline.launch.job import Job
from paceline.launch.nodes.rendezvous import Failed, Offer, Rendezvous, Report, read_report
from paceline.launch.nodes.rendezvous_agent import KeepRendezvous
from paceline.launch.workers.fork_server import ForkServer

_CHUNK = 1 << 16


class RendezvousAgent:
    """The launcher's handle on the process that keeps the rendezvous."""

    def __init__(self, channel: socket.socket, ticket: int) -> None:
        self.ticket = ticket
        """By which the fork server reports its start and its end."""
        self._channel = channel
        self._channel.setblocking(False)
        self._unread = b""
        self._failed = False

    @classmethod
    def start(
        cls,
        server: ForkServer,
        like: Job,
        rendezvous: Rendezvous,
        *,
        spec: Mapping[str, str],
        offer: Offer | None,
        log: Path,
    ) -> RendezvousAgent:
        """Ask for the process; `spec` is what must be the same on every machine, and an `offer` makes this one lead."""
        call = KeepRendezvous(rendezvous=rendezvous, spec=dict(spec), offer=offer)
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as file, Path(os.devnull).open("wb") as control:
            descriptors = [file.fileno(), file.fileno(), control.fileno(), theirs.fileno()]
            ticket = server.request(dataclasses.replace(like, call=call, threads=1), descriptors)
        return cls(ours, ticket)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `on_readable` has something."""
        return self._channel.fileno()

    def on_readable(self) -> list[Report]:
        """Return what was reported since; the last report of all is a `Failed`."""
        if self._failed:
            return []
        try:
            chunk = self._channel.recv(_CHUNK)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            chunk = b""
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        reports = [read_report(line) for line in lines]
        if not chunk and not any(isinstance(report, Failed) for report in reports):
            reports.append(Failed("the process that keeps the rendezvous has ended. See its log."))
        self._failed = isinstance(reports[-1], Failed) if reports else False
        return reports

    def close(self) -> None:
        """Hear no more of it; ending the process is the fork server's to do."""
        self._channel.close()

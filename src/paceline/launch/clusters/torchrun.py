"""Starts a command through torchrun, on one machine or on each of several. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline.errors import InputError
from paceline.launch.clusters.commands import PACELINE, Command, without
from paceline.launch.nodes.rendezvous import Rendezvous
from paceline.training.options import RunOptions

_OURS = ("--on", "--nodes", "--rendezvous", "--join-timeout", "--machine-timeout", "--secret-file")
"""What torchrun is told in its own words, or has no use for."""


class Torchrun:
    """torchrun of this Python: `--nodes` and `--rendezvous` become its `--nnodes` and its master."""

    def commands(self, options: RunOptions, arguments: Sequence[str]) -> tuple[Command, ...]:
        """Return the command for each machine."""
        run = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={options.processes}")
        ours = (*PACELINE, *without(arguments, *_OURS))
        if options.max_nodes == 1:
            return (Command("", (*run, "--standalone", *ours)),)
        meeting = _meeting(options)
        each = [
            (
                *(f"--nnodes={options.max_nodes}", f"--node-rank={rank}"),
                *(f"--master-addr={meeting.host}", f"--master-port={meeting.port}"),
            )
            for rank in range(options.max_nodes)
        ]
        names = [f"on {meeting.host}", *(f"on machine {rank}" for rank in range(1, options.max_nodes))]
        return tuple(Command(name, (*run, *where, *ours)) for name, where in zip(names, each, strict=True))

    def start(self, options: RunOptions, arguments: Sequence[str]) -> int:
        """Become this machine's."""
        commands = self.commands(options, arguments)
        if len(commands) == 1 or _meeting(options).is_here():
            commands[0].become()
        if len(commands) > 2:
            raise InputError(
                f"torchrun numbers its machines, and this one may be any of 1 to {len(commands) - 1}. "
                "Use the command that --dry-run prints for it."
            )
        commands[1].become()


def _meeting(options: RunOptions) -> Rendezvous:
    if options.rendezvous is None:
        raise InputError(
            f"--nodes {options.nodes} machines need a place to meet. Give --rendezvous host:port, with an address of the first."
        )
    meeting = Rendezvous.parse(options.rendezvous, str(options.nodes))
    if meeting.min_nodes != meeting.max_nodes:
        raise InputError(
            f"--nodes {options.nodes} may change, but torchrun's world keeps the machines that it began with. Give one number."
        )
    if options.total_servers:
        raise InputError(
            "torchrun starts as many processes on every machine, but servers stand on the first alone. Leave --on out."
        )
    return meeting

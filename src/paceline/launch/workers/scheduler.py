"""Starts workers, and gives each its place: on which machine, with which rank, and where it meets the others."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.launch.actions import Assign
from paceline.launch.base import LaunchPlan
from paceline.launch.file_writer import FileWriter
from paceline.launch.job import FunctionCall
from paceline.launch.membership import Membership
from paceline.launch.nodes.inventory import Node, Nodes
from paceline.launch.store import MeetingPoint
from paceline.launch.workers.roster import Roster, RosterEntry
from paceline.training import folder as run_folder
from paceline.transport.runtime_folder import RuntimeFolder
from paceline.world.env import Identity


class WorkerScheduler:
    """Who is to work where."""

    def __init__(self, plan: LaunchPlan, nodes: Nodes, roster: Roster, membership: Membership) -> None:
        self._plan, self._nodes = plan, nodes
        self._roster, self._membership = roster, membership
        self._folder: RuntimeFolder | None = None
        self._meeting_point: MeetingPoint | None = None
        self._starts = 0
        """How often all workers were started."""

    @property
    def started(self) -> bool:
        """Whether the first workers were started."""
        return self._starts > 0

    @property
    def resumes(self) -> bool:
        """Whether workers started now would go on from a checkpoint."""
        call, out = self._plan.jobs[0].call, self._plan.out
        if not isinstance(call, FunctionCall) or out is None:
            return False
        return bool(call.options.get("resume")) or (self._starts > 0 and run_folder.has_run(out))

    def open_store(self) -> None:
        """Serve the store that the workers of all machines meet at: another one each time all are started."""
        rendezvous = self._plan.rendezvous
        host = self._plan.address if rendezvous is None else rendezvous.bound
        if self._folder is None:
            self._folder = RuntimeFolder()
        if self._meeting_point is not None:
            self._meeting_point.close()
            self._meeting_point = None
        try:
            self._meeting_point = MeetingPoint(
                host,
                self._folder,
                None if rendezvous is None else self._plan.secret,
                self._plan.master_port,
            )
        except OSError as error:
            if self._plan.master_port:
                raise InputError(
                    f"--master-port {self._plan.master_port} cannot be had at {host}: {error.strerror}. Leave it out, and a free "
                    "port is taken."
                ) from None
            raise InputError(
                f"the store that the workers meet at cannot be served at {host}: {error.strerror}. Check the address and the "
                "limit of open files (`ulimit -n`)."
            ) from None

    def note_ended(self, rank: int, host: str) -> None:
        """Tell the other workers that a script has come to its end on this one."""
        if self._meeting_point is not None:
            self._meeting_point.note_ended(rank, host)

    def close(self) -> None:
        """Stop serving it."""
        if self._meeting_point is not None:
            self._meeting_point.close()
        if self._folder is not None:
            self._folder.close()

    def _where(self, address: str) -> dict[str, Any]:
        """Return where workers meet that reach this machine as `address`."""
        if self._meeting_point is None:
            raise RuntimeError("workers are started before there is a store")
        return {
            "master_address": address,
            "master_port": self._meeting_point.port,
            "store": self._meeting_point.address(address),
        }

    def start_all(self) -> None:
        """Start the workers of the first group, for the first time or over again.

        Only this machine is sure to have the checkpoint of a run that goes on: workers of others join, and get the state
        from these.
        """
        first = [self._nodes.own] if self.resumes or self._starts else list(self._nodes)
        for node in self._nodes:
            node.due = 0 if node in first else node.wanted
        places = [(number, node, local) for number, node in enumerate(first) for local in range(node.wanted)]
        # Servers are the last of this machine's workers, and have the last ranks of all.
        served = self._nodes.own.wanted - self._membership.policy.server_count
        places.sort(key=lambda place: place[0] == 0 and place[2] >= served)
        for rank, (number, node, local) in enumerate(places):
            identity = Identity(
                rank=rank,
                size=len(places),
                local_rank=local,
                local_size=node.wanted,
                node_rank=number,
                nodes=len(first),
                **self._where(node.store_address),
            )
            self._start(node, identity, rank=rank)
        self._starts += 1

    def start_due(self) -> None:
        """Start the workers of machines that have none yet."""
        for node in self._nodes:
            for _ in range(node.due):
                self.start_newcomer(node)
            node.due = 0

    def start_newcomer(self, node: Node | None = None) -> None:
        """Start a worker that will join; without a machine, where one is missing."""
        members = self._membership.members
        staying = Counter(one.node for one in self._roster.running() if not members[one.number].leaving)
        node = node or self._nodes.place(staying)
        # Its place on the machine is filled in when it is entered.
        identity = Identity(rank=0, size=1, local_rank=0, local_size=1, **self._where(node.store_address))
        self._start(node, identity, rank=None)

    def _start(self, node: Node, identity: Identity, rank: int | None) -> None:
        entry = self._roster.add(node.index, rank, slot=rank)
        # A GPU that somebody's death has set free, not that of a worker which is still there.
        local_size = max(identity.local_size, entry.local_rank + 1)
        identity = dataclasses.replace(identity, local_rank=entry.local_rank, local_size=local_size)
        self._membership.add(entry.number, rank=rank, host=node.index)
        call = self._plan.jobs[0].call
        if self.resumes and isinstance(call, FunctionCall):
            call = call.resumed()
        job = dataclasses.replace(
            self._plan.jobs[0], identity=identity, call=call, starts=self._starts, newcomer=rank is None
        )
        if rank == 0:
            self._show(entry.number)
        node.pool.start(entry.number, job, f"rank-{entry.slot}.log")

    def assign(self, places: list[Assign]) -> None:
        """Assign workers their places in the next group: the ranks of one machine follow each other."""
        hosts = [self._roster[one.member].node for one in places]
        nodes = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        # Those that are left keep their GPUs, so places in between may be empty.
        sizes = dict.fromkeys(nodes, 0)
        for place, host in zip(places, hosts, strict=True):
            sizes[host] = max(sizes[host], 1 + self._roster[place.member].local_rank)
        for place, host in zip(places, hosts, strict=True):
            self._roster[place.member].rank = place.rank
            if place.rank == 0:
                self._show(place.member)
            identity = Identity(
                rank=place.rank,
                size=place.size,
                local_rank=self._roster[place.member].local_rank,
                local_size=sizes[host],
                node_rank=nodes[host],
                nodes=len(nodes),
                **self._where(self._address_for(host)),
            )
            order = {"do": "place", "identity": asdict(identity), "generation": place.generation}
            order |= {"shares": place.shares, "reason": place.reason, "stop": place.stop, "save": place.save}
            self.send(place.member, order)

    def send(self, number: int, order: dict[str, Any]) -> None:
        """Send a worker an order; one whose machine is gone does not get it."""
        node = self._nodes.get(self._roster[number].node)
        if node is not None:
            node.pool.send(number, json.dumps(order).encode())

    def write_roster(self, folder: Path, files: FileWriter) -> None:
        """Write down who runs where."""
        members = self._membership.members

        def where(entry: RosterEntry) -> tuple[int | None, str] | None:
            node = self._nodes.get(entry.node)
            if node is None or members[entry.number].newcomer:
                return None
            return node.pool.pid(entry.number), node.host

        self._roster.write(folder, files, self._membership.generation, where)

    def _address_for(self, host: int) -> str:
        """Return where a machine's workers reach the store; one that is gone will not."""
        return (self._nodes.get(host) or self._nodes.own).store_address

    def _show(self, number: int) -> None:
        for node in self._nodes:
            node.pool.show(number)

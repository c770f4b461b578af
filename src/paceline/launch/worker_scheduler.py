"""Starts workers, and gives each its place: on which machine, with which rank, and where it meets the others."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.launch.actions import Assign
from paceline.launch.base import LaunchPlan
from paceline.launch.job import FunctionCall
from paceline.launch.membership import Membership
from paceline.launch.nodes import Node, Nodes
from paceline.launch.roster import Entry, Roster
from paceline.launch.store import listen
from paceline.launch.worker_pool import LocalWorkerPool
from paceline.training import folder as run_folder
from paceline.world.env import Identity


class WorkerScheduler:
    """Who is to work where."""

    def __init__(self, plan: LaunchPlan, sites: Nodes, roster: Roster, membership: Membership) -> None:
        self._plan, self._sites = plan, sites
        self._roster, self._membership = roster, membership
        self._store_port = 0
        self._starts = 0
        """How often all workers were started."""

    @property
    def store_port(self) -> int:
        """The port of the store that the next group meets at."""
        return self._store_port

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

    def open_store(self, crew: LocalWorkerPool) -> None:
        """Serve the store that the workers of all machines meet at."""
        rendezvous = self._plan.rendezvous
        with listen(self._plan.address if rendezvous is None else rendezvous.bound) as listening:
            crew.start_store(self._plan.jobs[0], listening)
            self._store_port = listening.getsockname()[1]

    def start_all(self) -> None:
        """Start the workers of the first group, for the first time or over again.

        Only this machine is sure to have the checkpoint of a run that goes on: workers of others join, and get the state
        from these.
        """
        first = [self._sites.own] if self.resumes or self._starts else list(self._sites)
        for site in self._sites:
            site.due = 0 if site in first else site.wanted
        seats = [(node, site, local) for node, site in enumerate(first) for local in range(site.wanted)]
        # Servers are the last of this machine's workers, and have the last ranks of all.
        served = self._sites.own.wanted - self._membership.policy.server_count
        seats.sort(key=lambda seat: seat[0] == 0 and seat[2] >= served)
        for rank, (node, site, local) in enumerate(seats):
            identity = Identity(
                rank=rank,
                size=len(seats),
                local_rank=local,
                local_size=site.wanted,
                node_rank=node,
                nodes=len(first),
                master_address=site.store_address,
                master_port=self.store_port,
            )
            self._start(site, identity, rank=rank)
        self._starts += 1

    def start_due(self) -> None:
        """Start the workers of machines that have none yet."""
        for site in self._sites:
            for _ in range(site.due):
                self.start_newcomer(site)
            site.due = 0

    def start_newcomer(self, site: Node | None = None) -> None:
        """Start a worker that will join; without a machine, where one is missing."""
        there = self._roster.counts()
        members = self._membership.members
        staying = Counter(one.site for one in self._roster.running() if not members[one.number].leaving)
        site = site or self._sites.place(staying)
        local = there[site.index]
        identity = Identity(
            rank=0, size=1, local_rank=local, local_size=local + 1, master_address=site.store_address
        )
        self._start(site, identity, rank=None)

    def _start(self, site: Node, identity: Identity, rank: int | None) -> None:
        entry = self._roster.add(site.index, rank, slot=rank)
        self._membership.add(entry.number, rank=rank, host=site.index)
        job = self._plan.jobs[0]
        call = job.call
        if self.resumes and isinstance(call, FunctionCall):
            call = call.resumed()
        job = dataclasses.replace(
            job,
            identity=identity,
            call=call,
            starts=self._starts,
            newcomer=rank is None,
        )
        if rank == 0:
            self._show(entry.number)
        site.hands.start(entry.number, job, f"rank-{entry.slot}.log")

    def assign(self, places: list[Assign]) -> None:
        """Assign workers their places in the next group: the ranks of one machine follow each other."""
        hosts = [self._roster[one.member].site for one in places]
        sizes, nodes = Counter(hosts), list(dict.fromkeys(hosts))
        seated: Counter[int] = Counter()
        for place, host in zip(places, hosts, strict=True):
            self._roster[place.member].rank = place.rank
            if place.rank == 0:
                self._show(place.member)
            identity = Identity(
                rank=place.rank,
                size=place.size,
                local_rank=seated[host],
                local_size=sizes[host],
                node_rank=nodes.index(host),
                nodes=len(nodes),
                master_address=self._address_for(host),
                master_port=self.store_port,
            )
            seated[host] += 1
            order = {"do": "place", "identity": asdict(identity), "generation": place.generation}
            order |= {"shares": place.shares, "reason": place.reason, "stop": place.stop}
            self.send(place.member, order)

    def send(self, number: int, order: dict[str, Any]) -> None:
        """Send a worker an order; one whose machine is gone does not get it."""
        site = self._sites.get(self._roster[number].site)
        if site is not None:
            site.hands.send(number, json.dumps(order).encode())

    def write_roster(self, folder: Path) -> None:
        """Write down who runs where."""
        members = self._membership.members

        def where(entry: Entry) -> tuple[int | None, str] | None:
            site = self._sites.get(entry.site)
            if site is None or members[entry.number].newcomer:
                return None
            return site.hands.pid(entry.number), site.host

        self._roster.write(folder, self._membership.generation, where)

    def _address_for(self, host: int) -> str:
        """Return where a machine's workers reach the store; one that is gone will not."""
        return (self._sites.get(host) or self._sites.own).store_address

    def _show(self, number: int) -> None:
        for site in self._sites:
            site.hands.show(number)

"""Starts a command on the nodes of a Ray cluster: an actor on each node runs paceline's own launcher there. Imports no torch.

The first node leads, and the others join it as machines do (docs/machines.md): a node that is lost is survived, and one that Ray
adds while the run goes on gets a launcher, too, as long as `--nodes` leaves a place. What passes between an actor and its
launcher is in `relay`.
"""

from __future__ import annotations

import contextlib
import importlib
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.errors import InputError, PacelineError
from paceline.launch.clusters import relay
from paceline.launch.clusters.commands import Command
from paceline.training.options import RunOptions
from paceline.transport.addresses import at
from paceline.world import env

TURN_S, RECRUIT_S, AGAIN_S, GOODBYE_S = 0.5, 2.0, 5.0, 10.0
"""How long the leader is listened to at a time, how often new nodes are looked for, when one that was cut off is started again,
and how long the others may take to end when the leader has."""
PATIENCE_S = 10.0
"""How long a node may take to make room for its actor before others are asked as well."""
TAIL = 2000
_PATH = "PYTHONPATH"
_REFUSED = 2
"""The exit status of a launcher that was not let in, and would not be the next time."""


class NodeRunner:
    """Runs one launcher on its node: an actor of Ray's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, int]:
        """Return the address of this node, and a port that is free there."""
        address = str(_ray().util.get_node_ip_address())
        with socket.create_server((address, 0)) as free:
            return address, int(free.getsockname()[1])

    def lead(
        self, arguments: Sequence[str], folder: str, told: Mapping[str, str]
    ) -> Iterator[tuple[str, bytes] | int]:
        """Run the command; yield what it writes ("out" or "err") as it comes, and its exit status at last."""
        with (
            self._started(arguments, folder, told, subprocess.PIPE) as process,
            selectors.DefaultSelector() as selector,
        ):
            yield "out", _until_here(process)
            selector.register(_stream(process.stdout), selectors.EVENT_READ, "out")
            selector.register(_stream(process.stderr), selectors.EVENT_READ, "err")
            while selector.get_map():
                for key, _ in selector.select():
                    chunk = key.fileobj.read(1 << 16)  # type: ignore[union-attr]
                    if chunk:
                        yield key.data, chunk
                    else:
                        selector.unregister(key.fileobj)
            yield relay.status(process)

    def follow(self, arguments: Sequence[str], folder: str, told: Mapping[str, str]) -> tuple[int, str]:
        """Run the command; return its exit status and the end of what it wrote."""
        with self._started(arguments, folder, told, subprocess.STDOUT) as process:
            tail = _until_here(process)
            while chunk := _stream(process.stdout).read(1 << 16):
                tail = (tail + chunk)[-TAIL:]
            return relay.status(process), tail.decode(errors="replace")

    def signal(self, number: int) -> None:
        """Pass a signal on to the launcher."""
        if self._process is not None:
            relay.send(self._process, str(number))

    @contextlib.contextmanager
    def _started(
        self, arguments: Sequence[str], folder: str, told: Mapping[str, str], errors: int
    ) -> Iterator[subprocess.Popen[bytes]]:
        # Ray gives each of its processes one thread, and a run shares the cores out by itself.
        ours = {name: value for name, value in env.snapshot().items() if name != "OMP_NUM_THREADS"}
        ours |= {_PATH: told[_PATH]} if _PATH in told else {}  # Python reads it when it starts
        words = (sys.executable, "-m", relay.MODULE, *arguments)
        with relay.start(words, told, cwd=folder, env=ours, stderr=errors) as self._process:
            yield self._process


def _stream(one: IO[bytes] | None) -> IO[bytes]:
    if one is None:
        raise RuntimeError("a process without its pipes")
    return one


def _until_here(process: subprocess.Popen[bytes]) -> bytes:
    """Read to the line by which the launcher says that it runs; return what was said before it."""
    before = b""
    while (line := _stream(process.stdout).readline()) and line.strip() != relay.HERE:
        before += line
    return before


@dataclass
class _Node:
    """A node that was asked for a place, and perhaps has a launcher."""

    name: str
    address: str
    actor: Any
    ready: Any
    """What says where it is, once it has room for the actor."""
    asked_at: float
    ended: Any = None
    """What its launcher returns, one day."""


class Ray:
    """The nodes of a Ray cluster that have what `--resources` asks for; a Ray of this machine alone where none is running."""

    def __init__(self, resources: str | None) -> None:
        self._asked = None if resources is None else parse_resources(resources)

    def resources(self, options: RunOptions) -> dict[str, float]:
        """Return what a node must have free for its workers: as asked, or a core for each, and a GPU where they want one."""
        if self._asked is not None:
            return self._asked
        cores = {"CPU": float(options.processes)}
        return {**cores, "GPU": float(options.workers)} if options.device == "cuda" else cores

    def commands(self, options: RunOptions, arguments: Sequence[str]) -> tuple[Command, ...]:
        """Return what would be started on each node."""
        needed = _listed(self.resources(options))
        alone = _is_alone(options)
        meeting = None if alone else "LEADER:PORT"
        lead, follow = (
            ("python", "-m", relay.MODULE, *relay.arguments(arguments, options, meeting, lead=leads))
            for leads in (not alone, False)
        )
        if options.max_nodes == 1:
            return (Command(f"on a node of Ray's that has {needed}", lead),)
        return (
            Command(f"on the first of {options.nodes} nodes of Ray's that have {needed}", lead),
            Command("on each other", follow),
        )

    def start(self, options: RunOptions, arguments: Sequence[str]) -> int:
        """Start the launchers, show what the leader says, and return its exit status."""
        ray = _ray()
        begun_here = not ray.is_initialized()
        if begun_here:
            try:
                ray.init(log_to_driver=False, logging_level="error")
            except ConnectionError as error:
                raise InputError(
                    f"no Ray cluster can be joined: {error}. Check RAY_ADDRESS; `ray status` shows whether there is one."
                ) from None
        try:
            return _Cluster(ray, options, self.resources(options), arguments, str(Path.cwd())).run()
        finally:
            if begun_here:
                ray.shutdown()


class _Cluster:
    """One run on a cluster: its leader, and the nodes that have joined it."""

    def __init__(
        self, ray: Any, options: RunOptions, needed: dict[str, float], arguments: Sequence[str], folder: str
    ) -> None:
        self._ray, self._options, self._needed, self._folder = ray, options, needed, folder
        self._given = arguments
        self._told = relay.variables(options, _PATH)
        self._meeting: str | None = None
        self._nodes: list[_Node] = []
        """Those that were asked, but for the one that leads."""
        self._barred: dict[str, float] = {}
        """Nodes that are not asked now, and until when."""
        self._recruit_at = 0.0
        self._is_busy_said = False

    def run(self) -> int:
        """Return the leader's exit status."""
        nodes = self._fitting()
        if not nodes:
            raise InputError(self._none_fits())
        try:
            leader = self._first(nodes)
            try:
                return self._led_by(leader)
            finally:
                self._ray.kill(leader.actor)
        finally:
            self._drop(*self._nodes)

    def _first(self, nodes: Mapping[str, str]) -> _Node:
        """Return the node that leads: the first of them, or another that has room before it does."""
        names = iter(nodes)
        self._ask(next(names), nodes)
        patience = PATIENCE_S
        while not (ready := self._ray.wait([one.ready for one in self._nodes], timeout=patience)[0]):
            self._say_busy()
            patience = RECRUIT_S
            if (another := next(names, None)) is not None:
                self._ask(another, nodes)
        leader = next(one for one in self._nodes if one.ready in ready)
        self._nodes.remove(leader)
        self._drop(*self._nodes)
        self._barred[leader.name] = float("inf")
        return leader

    def _led_by(self, leader: _Node) -> int:
        """Start the launcher that leads, and return its exit status when all have ended."""
        try:
            place = self._ray.get(leader.ready)
        except self._ray.exceptions.RayError as error:
            raise PacelineError(self._unable(leader, error)) from None
        self._meeting = None if _is_alone(self._options) else at(*place)
        lead = leader.actor.lead.options(num_returns="streaming")
        said = lead.remote(self._arguments(lead=self._meeting is not None), self._folder, self._told)
        with relay.signals_go_to(leader.actor.signal.remote):
            status = self._listen(said, leader)
        # They are told to end by the leader.
        ended = [one.ended for one in self._nodes if one.ended is not None]
        if ended:
            self._ray.wait(ended, num_returns=len(ended), timeout=GOODBYE_S)
        return status

    def _listen(self, said: Any, leader: _Node) -> int:
        """Show what the leader says, and see to the other nodes meanwhile."""
        while True:
            ready, _ = self._ray.wait([said], timeout=TURN_S)
            self._attend()
            if not ready:
                continue
            try:
                match self._ray.get(next(said)):
                    case int(status):
                        return status
                    case (str(stream), bytes(chunk)):
                        relay.show(sys.stdout if stream == "out" else sys.stderr, chunk)
            except self._ray.exceptions.RayTaskError as error:
                raise PacelineError(self._unable(leader, error)) from None
            except (self._ray.exceptions.RayActorError, StopIteration):
                raise PacelineError(
                    f"the node that leads, {leader.address}, is lost, and the run with it. "
                    "--resume goes on from its last checkpoint."
                ) from None

    def _attend(self) -> None:
        """Take leave of launchers that have ended, and start one on each node that there is a place for."""
        now = time.monotonic()
        if self._meeting is None or now < self._recruit_at:
            return
        self._recruit_at = now + RECRUIT_S
        for one in list(self._nodes):
            if one.ended is not None and self._ray.wait([one.ended], timeout=0)[0]:
                self._barred[one.name] = now + self._why_ended(one)
                self._drop(one)
        for one in [one for one in self._nodes if one.ended is None]:
            if not self._places():
                self._drop(one)
            elif self._ray.wait([one.ready], timeout=0)[0]:
                one.ended = one.actor.follow.remote(self._arguments(lead=False), self._folder, self._told)
        waiting = [one.asked_at > now - PATIENCE_S for one in self._nodes if one.ended is None]
        if not all(waiting):
            self._say_busy()
        nodes = self._fitting()
        asked = {one.name for one in self._nodes}
        open_to = [name for name in nodes if name not in asked and self._barred.get(name, 0.0) <= now]
        for name in open_to[: max(0, self._places() - sum(waiting))]:
            self._ask(name, nodes)

    def _places(self) -> int:
        """Return for how many more launchers there is a place."""
        return self._options.max_nodes - 1 - sum(one.ended is not None for one in self._nodes)

    def _why_ended(self, one: _Node) -> float:
        """Report why a launcher has ended before the leader; return for how many seconds its node is not asked again."""
        try:
            status, tail = self._ray.get(one.ended)
        except self._ray.exceptions.RayTaskError as error:
            _say(f"note: {self._unable(one, error)} The others go on.")
            return float("inf")
        except self._ray.exceptions.RayError:
            _say(f"note: node {one.address} is lost; the others go on.")
            return AGAIN_S
        if status:
            last = (tail.strip().splitlines() or ["nothing was said"])[-1]
            _say(f"note: the launcher on node {one.address} has ended with status {status}: {last}")
        return float("inf") if status == _REFUSED else AGAIN_S

    def _unable(self, one: _Node, error: Exception) -> str:
        last = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
        return f"the command cannot be run on node {one.address}: {last}. {self._folder} and paceline must be there, too."

    def _say_busy(self) -> None:
        if not self._is_busy_said:
            self._is_busy_said = True
            _say(
                f"note: a node that has {_listed(self._needed)} does not have it free; this waits for it, and asks others. "
                "`ray status` shows what is in use."
            )

    def _arguments(self, *, lead: bool) -> list[str]:
        return relay.arguments(self._given, self._options, self._meeting, lead=lead)

    def _ask(self, name: str, nodes: Mapping[str, str]) -> None:
        """Have Ray make room for an actor on a node."""
        actor = self._actor(name)
        self._nodes.append(_Node(name, nodes[name], actor, actor.place.remote(), time.monotonic()))

    def _drop(self, *nodes: _Node) -> None:
        for one in nodes:
            self._nodes.remove(one)
            self._ray.kill(one.actor)

    def _actor(self, node: str) -> Any:
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        others = {name: amount for name, amount in self._needed.items() if name not in ("CPU", "GPU")}
        return (
            self._ray.remote(NodeRunner)
            .options(
                num_cpus=self._needed.get("CPU", 0),
                num_gpus=self._needed.get("GPU", 0),
                resources=others,
                scheduling_strategy=strategy,
                max_concurrency=2,  # a signal comes while the launcher runs
            )
            .remote()
        )

    def _fitting(self) -> dict[str, str]:
        """Return the nodes that are large enough, with their addresses; the one of this process first."""
        own = self._ray.get_runtime_context().get_node_id()
        found = {
            str(one["NodeID"]): str(one["NodeManagerAddress"])
            for one in self._ray.nodes()
            if one["Alive"]
            and all(one["Resources"].get(name, 0.0) >= amount for name, amount in self._needed.items())
        }
        return dict(sorted(found.items(), key=lambda one: (one[0] != own, one[1])))

    def _none_fits(self) -> str:
        there = "; ".join(
            _listed(
                {
                    name: amount
                    for name, amount in sorted(one["Resources"].items())
                    if name in (*self._needed, "CPU")
                }
            )
            for one in self._ray.nodes()
            if one["Alive"]
        )
        needed = _listed(self._needed)
        return f"no node of this Ray cluster has {needed} (there are: {there}). Use fewer --workers, or --resources."


def parse_resources(text: str) -> dict[str, float]:
    """Read --resources: CPU=4,GPU=1,fast_disk=1."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, amount = part.strip().partition("=")
        if name in found:
            raise InputError(f"--resources {text!r} names {name} twice. Leave one out.")
        try:
            found[name] = float(amount)
        except ValueError:
            equals = ""
        if not equals or not name or not 0 <= found[name] < float("inf"):
            raise InputError(f"--resources {text!r} is no list of resources. Give NAME=AMOUNT: CPU=4,GPU=1.")
    return found


def _is_alone(options: RunOptions) -> bool:
    """Return whether one node needs no place to meet; one that a file of options names has to be replaced by the right one."""
    return options.max_nodes == 1 and options.rendezvous is None


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={amount:g}" for name, amount in resources.items())


def _ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise InputError(f"--on ray needs Ray ({error}). Use pip install 'paceline[ray]'.") from None
    return ray


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201

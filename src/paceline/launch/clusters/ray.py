"""Starts a command on the nodes of a Ray cluster: an actor on each node runs paceline's own launcher there. Imports no torch.

The first node leads, and the others join it as machines do (docs/machines.md): a node that is lost is survived, and one that Ray
adds while the run goes on gets a launcher, too, as long as `--nodes` leaves a place. The other side is `paceline.cli.in_ray`.
"""

from __future__ import annotations

import contextlib
import importlib
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InputError, PacelineError
from paceline.launch.clusters.commands import Command, without
from paceline.training.options import RunOptions
from paceline.transport.addresses import at
from paceline.transport.secret import Secret
from paceline.world import env
from paceline.world.run_secret import run_secret

MODULE = "paceline.cli.in_ray"
OURS = ("--on", "--resources", "--nodes", "--rendezvous", "--secret-file", "--out")
"""Options that say where a run is to be, which is decided here."""
TURN_S, RECRUIT_S, AGAIN_S, GOODBYE_S = 0.5, 2.0, 5.0, 10.0
"""How long the leader is listened to at a time, how often new nodes are looked for, when one that was cut off is started again,
and how long the others may take to end when the leader has."""
TAIL = 2000
_PASSED_ON = ("GLOO_", "NCCL_", "OMP_", "TORCH_", "PYTHONPATH")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
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
        self, arguments: Sequence[str], folder: str, variables: Mapping[str, str]
    ) -> Iterator[tuple[str, bytes] | int]:
        """Run the command; yield what it writes ("out" or "err") as it comes, and its exit status at last."""
        with self._started(arguments, folder, variables) as process, selectors.DefaultSelector() as selector:
            selector.register(_stream(process.stdout), selectors.EVENT_READ, "out")
            selector.register(_stream(process.stderr), selectors.EVENT_READ, "err")
            while selector.get_map():
                for key, _ in selector.select():
                    chunk = key.fileobj.read1(1 << 16)  # type: ignore[union-attr]
                    if chunk:
                        yield key.data, chunk
                    else:
                        selector.unregister(key.fileobj)
            yield _status(process)

    def follow(self, arguments: Sequence[str], folder: str, variables: Mapping[str, str]) -> tuple[int, str]:
        """Run the command; return its exit status and the end of what it wrote."""
        tail = b""
        with self._started(arguments, folder, variables, together=True) as process:
            while chunk := _stream(process.stdout).read1(1 << 16):
                tail = (tail + chunk)[-TAIL:]
            return _status(process), tail.decode(errors="replace")

    def signal(self, number: int) -> None:
        """Pass a signal on to the launcher."""
        if self._process is not None:
            self._process.send_signal(number)

    @contextlib.contextmanager
    def _started(
        self, arguments: Sequence[str], folder: str, variables: Mapping[str, str], *, together: bool = False
    ) -> Iterator[subprocess.Popen[bytes]]:
        # Ray gives each of its processes one thread, and a run shares the cores out by itself.
        ours = {name: value for name, value in env.snapshot().items() if name != "OMP_NUM_THREADS"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *arguments],
            cwd=folder,
            env={**ours, **variables},
            stdin=subprocess.PIPE,  # its end tells the launcher that this process is gone
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if together else subprocess.PIPE,
        )
        with self._process:
            yield self._process


def _stream(one: Any) -> Any:
    if one is None:
        raise RuntimeError("a process without its pipes")
    return one


def _status(process: subprocess.Popen[bytes]) -> int:
    code = process.wait()
    return 128 - code if code < 0 else code


@dataclass(frozen=True)
class _Follower:
    node: str
    address: str
    actor: Any
    ended: Any
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
        needed = ", ".join(f"{name}={amount:g}" for name, amount in self.resources(options).items())
        words = ("python", "-m", MODULE, *_arguments(options, arguments, "LEADER:PORT"))
        if options.max_nodes == 1:
            return (Command(f"on a node of Ray's that has {needed}", words),)
        return (
            Command(f"on the first of {options.nodes} nodes of Ray's that have {needed}", (*words, "--lead")),
            Command("on each other", words),
        )

    def start(self, options: RunOptions, arguments: Sequence[str]) -> int:
        """Start the launchers, show what the leader says, and return its exit status."""
        if options.rendezvous is not None or options.lead:
            raise InputError(
                "--on ray chooses the node that leads by itself. Leave out --rendezvous and --lead."
            )
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
            return _Cluster(ray, options, self.resources(options), arguments).run()
        finally:
            if begun_here:
                ray.shutdown()


class _Cluster:
    """One run on a cluster: its leader, and the nodes that have joined it."""

    def __init__(
        self, ray: Any, options: RunOptions, needed: dict[str, float], arguments: Sequence[str]
    ) -> None:
        self._ray, self._options, self._needed = ray, options, needed
        self._given = arguments
        self._arguments: list[str] = []
        self._followers: list[_Follower] = []
        self._barred: dict[str, float] = {}
        """Nodes that are not asked for now, and until when."""
        self._recruit_at = 0.0
        self._folder = str(Path.cwd())
        self._variables = _variables(options)

    def run(self) -> int:
        """Return the leader's exit status."""
        nodes = self._fitting()
        if not nodes:
            raise InputError(self._none_fits())
        first = next(iter(nodes))
        leader = self._actor(first)
        self._barred[first] = float("inf")
        meeting = "" if self._options.max_nodes == 1 else at(*self._ray.get(leader.place.remote()))
        self._arguments = _arguments(self._options, self._given, meeting)
        leads = [*self._arguments, *(["--lead"] if meeting else [])]
        said = leader.lead.options(num_returns="streaming").remote(leads, self._folder, self._variables)
        try:
            with _passed_on(leader.signal.remote):
                return self._listen(said, nodes[first])
        finally:
            self._end(leader)

    def _listen(self, said: Any, address: str) -> int:
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
                        _show(stream, chunk)
            except self._ray.exceptions.RayTaskError as error:
                raise PacelineError(
                    f"the command cannot be run on node {address}: {error.cause}. {self._folder} and paceline must be there, too."
                ) from None
            except (self._ray.exceptions.RayActorError, StopIteration):
                raise PacelineError(
                    f"the node that leads, {address}, is lost, and the run with it. --resume goes on from its last checkpoint."
                ) from None

    def _attend(self) -> None:
        """Take leave of launchers that have ended, and start one on each node that there is a place for."""
        now = time.monotonic()
        if self._options.max_nodes == 1 or now < self._recruit_at:
            return
        self._recruit_at = now + RECRUIT_S
        for one in list(self._followers):
            if self._ray.wait([one.ended], timeout=0)[0]:
                self._followers.remove(one)
                self._barred[one.node] = now + AGAIN_S if self._why_ended(one) != _REFUSED else float("inf")
        busy = {one.node for one in self._followers}
        for node, address in self._fitting().items():
            if len(self._followers) + 1 >= self._options.max_nodes:
                return
            if node not in busy and self._barred.get(node, 0.0) <= now:
                actor = self._actor(node)
                ended = actor.follow.remote(self._arguments, self._folder, self._variables)
                self._followers.append(_Follower(node, address, actor, ended))

    def _why_ended(self, one: _Follower) -> int | None:
        """Say why a launcher has ended before the leader; return its exit status, None where its node is lost."""
        try:
            status, tail = self._ray.get(one.ended)
        except self._ray.exceptions.RayError:
            _say(f"note: node {one.address} is lost; the others go on.")
            return None
        if status:
            last = (tail.strip().splitlines() or ["nothing was said"])[-1]
            _say(f"note: the launcher on node {one.address} has ended with status {status}: {last}")
        return int(status)

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
        needed = ", ".join(f"{name}={amount:g}" for name, amount in self._needed.items())
        there = "; ".join(
            ", ".join(
                f"{name}={amount:g}"
                for name, amount in sorted(one["Resources"].items())
                if name in (*self._needed, "CPU")
            )
            for one in self._ray.nodes()
            if one["Alive"]
        )
        return f"no node of this Ray cluster has {needed} (there are: {there}). Use fewer --workers, or --resources."

    def _end(self, leader: Any) -> None:
        """Give the others a moment to end by themselves, as the leader has told them to, and then end all actors."""
        ended = [one.ended for one in self._followers]
        if ended:
            self._ray.wait(ended, num_returns=len(ended), timeout=GOODBYE_S)
        for actor in (leader, *(one.actor for one in self._followers)):
            self._ray.kill(actor)


def parse_resources(text: str) -> dict[str, float]:
    """Read --resources: CPU=4,GPU=1,fast_disk=1."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, amount = part.strip().partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            equals = ""
        if not equals or not name or not 0 <= found[name] < float("inf"):
            raise InputError(f"--resources {text!r} is no list of resources. Give NAME=AMOUNT: CPU=4,GPU=1.")
    return found


def _arguments(options: RunOptions, arguments: Sequence[str], meeting: str) -> list[str]:
    """Return the command line for each node."""
    kept = without(arguments, *OURS)
    kept += [] if options.out is None else [f"--out={options.out}"]
    return [*kept, f"--nodes={options.nodes}", f"--rendezvous={meeting}"] if meeting else kept


def _variables(options: RunOptions) -> dict[str, str]:
    """Return what every launcher gets: how tensors travel, and the secret of the run, where there are several."""
    found = {name: value for name, value in env.snapshot().items() if name.startswith(_PASSED_ON)}
    if options.max_nodes == 1:
        return found
    secret = run_secret() if options.secret_file is None else Secret.read(Path(options.secret_file))
    return {**found, env.SECRET: (secret or Secret.make()).text}


def _ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise InputError(f"--on ray needs Ray ({error}). Use pip install 'paceline[ray]'.") from None
    return ray


def _show(stream: str, chunk: bytes) -> None:
    target = sys.stdout if stream == "out" else sys.stderr
    target.flush()
    target.buffer.write(chunk)
    target.flush()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def _passed_on(send: Any) -> Iterator[None]:
    """Have signals go to the leader for a while; the third that asks for the end leaves at once."""
    asked = 0

    def handle(number: int, _: Any) -> None:
        nonlocal asked
        asked += number != signal.SIGUSR1
        if asked > 2:
            raise KeyboardInterrupt
        send(number)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)

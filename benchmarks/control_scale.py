"""What a leader spends on many workers: forming their group, losing one of them, regrouping, and watching them train.

    python benchmarks/control_scale.py [--sizes 8,64,512,2048] [--write]

The leader is real: supervisor, membership, control connections, store. Its workers are simulated, eight to a machine, by two
processes that say over encrypted connections what launchers and workers say; nothing is trained, and no process group of torch's
forms. Each worker that forms a group asks the store as gloo has it asked: it connects, writes an address and reads all others.
What launchers say of their workers once a second, whatever happens, is measured by itself (training). Wall times include the
simulation, which shares this machine's cores; the leader's CPU seconds do not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing as mp
import os
import platform
import resource
import socket
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from paceline.launch.base import LaunchSpec
from paceline.launch.console import Console
from paceline.launch.job import ScriptCall
from paceline.launch.local import LocalLauncher
from paceline.launch.nodes import travel
from paceline.launch.nodes.hello import Hello, spec_of
from paceline.launch.nodes.rendezvous import Rendezvous
from paceline.launch.policy import Policy
from paceline.launch.supervisor import Supervisor
from paceline.recovery.membership import STEP, Standing
from paceline.transport import curve
from paceline.transport.key_value import OK, unpack
from paceline.transport.router import keep_alive
from paceline.transport.secret import Secret
from paceline.transport.store_server import SILENCE_S
from paceline.world.env import SECRET
from paceline.world.status_page import OperationKind, Phase, Reading

RESULT = Path(__file__).with_name("results") / "control_scale.json"
HERE = "127.0.0.1"
PER_MACHINE = 8
SIMULATORS = 2
ROUNDS = 5
"""How often, in training, each machine tells what its workers are at."""
ADDRESS_BYTES = 178
"""What gloo writes in a group of three; it adds eight bytes for each rank more, which is left out here."""
GONE = -9


@dataclass
class Worker:
    """A simulated worker: what it asks the store for, and where it stands."""

    number: int
    machine: Machine
    store: zmq.Socket[bytes]
    size: int = 0
    asked: list[list[bytes]] = field(default_factory=list)
    """What it has yet to ask for, in its order."""
    first: bool = True


@dataclass
class Machine:
    """A simulated launcher that follows."""

    control: zmq.Socket[bytes]
    workers: dict[int, Worker] = field(default_factory=dict)
    let_in: bool = False

    def say(self, message: dict[str, Any]) -> None:
        self.control.send(json.dumps(message).encode())


class Simulator:
    """Some of the machines, in one process and one thread."""

    def __init__(self, machines: int, leader: tuple[str, int], secret: str, spec: dict[str, str]) -> None:
        self._secret = Secret(secret)
        self._context = zmq.Context()
        self._context.max_sockets = 10_000
        self._poller = zmq.Poller()
        self._owners: dict[zmq.Socket[bytes], Machine | Worker] = {}
        self._port = socket.create_server((HERE, 0), backlog=1024)
        self.formed = 0
        self.machines = []
        for index in range(machines):
            control = self._connect(f"tcp://{leader[0]}:{leader[1]}", 15.0)
            machine = Machine(control)
            self._owners[control] = machine
            self.machines.append(machine)
            hello = Hello(
                host=f"simulated-{os.getpid()}-{index}",
                address=HERE,
                dialed=HERE,
                workers_address=HERE,
                port=self._port.getsockname()[1],
                spec=spec,
            )
            machine.say(hello.pack())

    def _connect(self, address: str, silence_s: float) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.DEALER)
        curve.call(made, self._secret)
        keep_alive(made, silence_s)
        made.linger, made.sndhwm, made.rcvhwm = 500, 0, 0
        made.handshake_ivl = 60_000  # thousands of handshakes at once take their time on two cores
        made.connect(address)
        self._poller.register(made, zmq.POLLIN)
        return made

    def turn(self, wait_ms: int) -> None:
        """Hear what comes within a while, and answer it."""
        for one, _ in self._poller.poll(wait_ms):
            owner = self._owners[one]
            while True:
                try:
                    frames = one.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._hear(owner, json.loads(frames[0])) if isinstance(owner, Machine) else self._got(
                    owner, frames
                )

    def _hear(self, machine: Machine, message: dict[str, Any]) -> None:
        match message:
            case {"welcome": _}:
                machine.let_in = True
            case {"refused": reason} | {"do": "leave", "reason": reason}:
                raise SystemExit(reason)
            case {"do": "reach", "trial": trial}:
                machine.say({"reached": trial, "failed": {}})
            case {"do": "start", "number": number, "identity": identity}:
                machine.say({"started": number, "pid": number + 1})
                worker = Worker(number, machine, self._connect(identity["store"], SILENCE_S))
                machine.workers[number] = self._owners[worker.store] = worker
                self._meet(worker, identity, 0)
            case {"do": "send", "number": number, "order": {"do": "break"}}:
                standing = Standing(operation=10, kind=STEP, step=10)
                machine.say({"said": "broken", "number": number, "value": asdict(standing)})
            case {
                "do": "send",
                "number": number,
                "order": {"do": "place", "identity": identity, "generation": new},
            }:
                self._meet(machine.workers[number], identity, new)

    def _meet(self, worker: Worker, identity: dict[str, Any], generation: int) -> None:
        worker.size, folder = identity["size"], f"generation-{generation}/0".encode()
        worker.asked = [
            [b"check"],
            [b"set", folder + b"/%d" % identity["rank"], _address()],
            [b"gather", folder, b"%d" % worker.size],
        ]
        self._ask(worker)

    def _ask(self, worker: Worker) -> None:
        worker.store.send_multipart([b"%d" % len(worker.asked), *worker.asked[0]])

    def _got(self, worker: Worker, frames: list[bytes]) -> None:
        assert frames[1] == OK, frames
        what = worker.asked.pop(0)[0]
        if what == b"gather":
            assert [len(one) for one in unpack(frames[2])] == [ADDRESS_BYTES] * worker.size
        if worker.asked:
            self._ask(worker)
            return
        self.formed += 1
        if worker.first:
            worker.first = False
            worker.machine.say({"said": "began", "number": worker.number, "value": None})

    def lose_one(self) -> None:
        """Have the first worker killed."""
        machine = next(one for one in self.machines if one.workers)
        number, worker = next(iter(machine.workers.items()))
        del machine.workers[number]
        self._close(worker)
        machine.say({"ended": number, "status": GONE, "why": ""})

    def read(self) -> None:
        """Tell, as every launcher does once a second, what the workers are at."""
        now = time.monotonic()
        for machine in (one for one in self.machines if one.let_in):
            readings = [[number, _reading(now), "R"] for number in machine.workers]
            machine.say({"readings": readings})

    def end(self) -> None:
        """Have all workers return."""
        for machine in self.machines:
            for number, worker in machine.workers.items():
                machine.say({"said": "result", "number": number, "value": None})
                machine.say({"ended": number, "status": 0, "why": ""})
                self._close(worker)

    def _close(self, worker: Worker) -> None:
        self._poller.unregister(worker.store)
        del self._owners[worker.store]
        worker.store.close(0)

    def close(self) -> None:
        for machine in self.machines:
            machine.control.close()
        self._context.term()
        self._port.close()


def _address() -> bytes:
    """Return what looks like an address of gloo's: a port and a random number, and zeros between them."""
    return (bytes(20) + os.urandom(2) + b"\x7f\0\0\x01" + bytes(120) + os.urandom(6)).ljust(
        ADDRESS_BYTES, b"\0"
    )


def _reading(now: float) -> dict[str, Any]:
    reading = Reading(
        phase=Phase.COMPUTE, since=now, touched=now, operation=10, kind=OperationKind.STEP, step=10, batches=1, steps=10,
        data_s=1.0, compute_s=1.0, communication_s=1.0, longest_s=0.1,
    )  # fmt: skip
    return travel.pack_reading(reading, now)


def simulate(
    orders: Connection, machines: int, leader: tuple[str, int], secret: str, spec: dict[str, str]
) -> None:
    """Run machines in this process until told to end; answer when a number of workers has formed a group."""
    simulator = Simulator(machines, leader, secret, spec)
    wanted: int | None = None
    read_at, rounds = 0.0, 0
    while True:
        simulator.turn(20)
        if rounds and (now := time.monotonic()) >= read_at:
            read_at = now + 1.0
            simulator.read()
            rounds -= 1
            if not rounds:
                orders.send(now)
        if wanted is not None and simulator.formed >= wanted:
            orders.send(time.monotonic())
            wanted, simulator.formed = None, 0
        if not orders.poll():
            continue
        match orders.recv():
            case int(number):
                wanted = number
            case "lose":
                simulator.lose_one()
            case "train":
                rounds = ROUNDS
            case "end":
                simulator.end()
            case None:
                break
    simulator.close()


class Conductor:
    """Has the simulated workers do one thing after the other, and reads the leader's CPU time between them."""

    def __init__(self, supervisor: Supervisor, size: int, simulators: list[Connection]) -> None:
        self.supervisor, self.size, self.simulators = supervisor, size, simulators
        self.phases: dict[str, dict[str, float]] = {}
        self._began = self._cpu = 0.0
        self._requests = 0

    @property
    def requests(self) -> int:
        point = self.supervisor._scheduler._meeting_point  # noqa: SLF001
        return 0 if point is None else point._server.requests  # noqa: SLF001

    def begin(self) -> None:
        self._began, self._cpu, self._requests = time.monotonic(), time.process_time(), self.requests

    def note(self, name: str, workers: int, ended: float | None = None) -> None:
        self.phases[name] = {
            "wall_s": round((ended or time.monotonic()) - self._began, 3),
            "leader_cpu_s": round(time.process_time() - self._cpu, 3),
            "store_requests_per_worker": round((self.requests - self._requests) / workers, 3),
        }
        self.begin()

    def all_formed(self, counts: list[int]) -> float:
        for one, count in zip(self.simulators, counts, strict=True):
            one.send(count)
        return max(one.recv() for one in self.simulators)

    def run(self) -> None:
        """Go through all phases; what fails here ends the benchmark, whose leader would wait for ever."""
        try:
            self._run()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)

    def _run(self) -> None:
        leading = self.supervisor._leading  # noqa: SLF001
        assert leading is not None
        while not leading._gathered:  # noqa: SLF001
            time.sleep(0.002)
        self.note("machines come", self.size)
        counts = share(self.size)
        self.note("forming", self.size, self.all_formed(counts))
        time.sleep(1.0)  # until the leader has heard of it, too
        self.begin()
        self.simulators[0].send("lose")
        self.note("losing one and regrouping", self.size - 1, self.all_formed([counts[0] - 1, *counts[1:]]))
        time.sleep(1.0)
        self.begin()
        for one in self.simulators:
            one.send("train")
        for one in self.simulators:
            one.recv()
        time.sleep(1.0)
        self.note("training", self.size - 1)
        for one in self.simulators:
            one.send("end")


def share(size: int) -> list[int]:
    """Return how many workers each simulator has."""
    machines = size // PER_MACHINE
    return [PER_MACHINE * len(range(index, machines, SIMULATORS)) for index in range(SIMULATORS)]


def measure(size: int, folder: Path) -> dict[str, dict[str, float]]:
    """Lead so many simulated workers through all phases."""
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    machines = size // PER_MACHINE
    patience = {"join_s": 600.0, "silence_s": 60.0, "last_call_s": 600.0}
    wanted = 1 + machines
    rendezvous = Rendezvous(host=HERE, port=port, min_nodes=wanted, max_nodes=wanted, leads=True, **patience)
    policy = Policy(workers=size, shards=size, trains=True, max_restarts=0, hang_timeout=3600.0)
    call = ScriptCall(target="simulated.py", is_module=False)
    spec = LaunchSpec(
        call=call,
        workers=PER_MACHINE,
        threads=1,
        rendezvous=rendezvous,
        policy=policy,
        out=folder,
        agreed={"task": "none"},
    )
    plan = LocalLauncher().plan(spec)
    (folder / "logs").mkdir(parents=True)
    supervisor = Supervisor(plan, folder, Console())
    # All are on other machines: everything crosses a connection.
    supervisor._nodes.own.wanted = 0  # noqa: SLF001
    spawned = mp.get_context("spawn")
    simulators, ends = [], []
    time.sleep(6.0)  # the fork server loads torch, which costs the cores
    for count in share(size):
        ours, theirs = spawned.Pipe()
        arguments = (
            theirs,
            count // PER_MACHINE,
            (HERE, port),
            plan.secret.text,
            spec_of(plan.agreed, rendezvous),
        )
        simulators.append(spawned.Process(target=simulate, args=arguments, daemon=True))
        ends.append(ours)
    conductor = Conductor(supervisor, size, ends)
    conducting = threading.Thread(target=conductor.run)
    for one in simulators:
        one.start()
    conductor.begin()
    conducting.start()
    try:
        outcome = supervisor.run()
    finally:
        supervisor.close()
        for end in ends:
            end.send(None)
        for one in simulators:
            one.join()
    conducting.join()
    assert outcome.failure is None, outcome.failure
    return conductor.phases


def exponents(results: dict[int, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return by which power of the number of workers the leader's CPU seconds grow between two sizes."""
    found: dict[str, dict[str, float]] = {}
    sizes = sorted(results)
    for small, large in itertools.pairwise(sizes):
        for phase in results[large]:
            before, after = (max(results[one][phase]["leader_cpu_s"], 0.001) for one in (small, large))
            power = math.log(after / before) / math.log(large / small)
            found.setdefault(phase, {})[f"{small} to {large}"] = round(power, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="8,64,512,2048")
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ.pop(SECRET, None)
    results: dict[int, dict[str, dict[str, float]]] = {}
    for size in map(int, options.sizes.split(",")):
        with tempfile.TemporaryDirectory(prefix="paceline-scale-") as folder:
            results[size] = measure(size, Path(folder) / "run")
        for phase, numbers in results[size].items():
            print(
                f"{size:5} workers  {phase:26} "
                + "  ".join(f"{name} {value:g}" for name, value in numbers.items())
            )
    grown = exponents(results)
    for phase, powers in grown.items():
        print(f"growth of the leader's CPU seconds, {phase}: {powers}")
    if options.write:
        about = {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "zmq": zmq.zmq_version(),
            "pyzmq": zmq.__version__,
            "workers per machine": PER_MACHINE,
            "rounds of readings": ROUNDS,
        }
        cases = {str(size): phases for size, phases in results.items()}
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(
            json.dumps({"about": about, "workers": cases, "growth of leader_cpu_s": grown}, indent=1) + "\n"
        )


if __name__ == "__main__":
    sys.exit(main())

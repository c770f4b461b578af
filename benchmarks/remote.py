"""What calls between workers cost: against torch's rpc_sync, batched and single, the parameter server, sparse traffic, pipelines.

    python benchmarks/remote.py [--only calls,batching,servers,traffic,pipeline] [--rounds 6] [--write]

Contenders live in the same workers and take turns; ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq
from models import CASES
from step_overhead import optimizer_for
from torch import Tensor, nn
from torch.distributed import PrefixStore, rpc

import paceline
from paceline import remote
from paceline.remote.names import Roles
from paceline.remote.opening import open_session
from paceline.strategies.tuning import Tuning
from paceline.training.run import engine_of
from paceline.transport.sealing import BOOT_BYTES, PIECE, TAG_BYTES, Seal, header

RESULT = Path(__file__).with_name("results") / "remote.json"
ROUNDS = 6
HERE = "127.0.0.1"
BETWEEN_MACHINES: dict[str, Any] = {"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]}
"""What torch chooses for workers of two machines; on one it copies large tensors from memory to memory, whatever its address."""
VALUES = (("40 B", torch.ones(10), 400), ("4 MB", torch.ones(1 << 20), 40))


# A call.


@remote.service
class Echo:
    """Gives back what it gets."""

    def echo(self, value: Tensor) -> Tensor:
        return value


def raw_echo(value: Tensor) -> Tensor:
    """The same as a bare function of torch's RPC."""
    return value


def time_calls(run: paceline.Run, way: str) -> dict[str, float]:
    """Microseconds a call, one after the other and 64 at a time, for a small and a large tensor; a first turn warms up."""
    world = run.world
    assert world.store is not None
    if way == "bare tcp":
        return _times_of_sockets(world)
    if way.startswith("torch"):
        backend = rpc.TensorPipeRpcBackendOptions(**(BETWEEN_MACHINES if way == "torch tcp" else {}))
        rpc.init_rpc(f"worker{world.rank}", rank=world.rank, world_size=2, rpc_backend_options=backend)
        found = _times(
            lambda value: rpc.rpc_sync("worker1", raw_echo, args=(value,)),
            lambda value: rpc.rpc_async("worker1", raw_echo, args=(value,)),
        )
        rpc.shutdown()
        return found
    machine = f"of {world.rank}" if way == "sealed tcp" else None  # of two machines, as far as they know
    roles = Roles.of({"callers": 1, "servers": 1})
    with open_session(
        PrefixStore("calls", world.store), world.rank, roles, b"benchmark", machine=machine
    ) as session:
        if session.role == "servers":
            return {}
        echo = remote.method(remote.create("server:0", Echo).echo)
        return _times(echo, echo.future)


def _times(call: Callable[[Tensor], Any], later: Callable[[Tensor], Any]) -> dict[str, float]:
    if dist.get_rank() != 0:
        return {}
    found: dict[str, float] = {}
    for _ in range(2):
        for label, value, count in VALUES:
            found[f"{label}, one by one"] = _sequence(lambda value=value: call(value), count)
            found[f"{label}, 64 in flight"] = _flights(lambda value=value: later(value), count)
    return found


def _times_of_sockets(world: paceline.World) -> dict[str, float]:
    """The least that a large tensor over TCP can cost: a bare connection, nothing sealed, into memory that is there already."""
    memory = memoryview(bytearray(4 << 20))

    def echo(connection: socket.socket, *, first: bool) -> bool:
        for sends in (first, not first):
            if sends:
                connection.sendall(memory)
            elif connection.recv_into(memory, 0, socket.MSG_WAITALL) < len(memory):
                return False
        return True

    assert world.store is not None
    if world.rank:
        with socket.create_server((HERE, 0)) as listening:
            world.store.set("bare", str(listening.getsockname()[1]))
            connection = listening.accept()[0]
        with connection:
            while echo(connection, first=False):
                pass
        return {}
    with socket.create_connection((HERE, int(world.store.get("bare")))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return {
            "4 MB, one by one": [_sequence(lambda: echo(connection, first=True), 40) for _ in range(2)][1]
        }


def time_sealing() -> float:
    """Microseconds to seal and open 4 MB twice, as a call there and back must, in one thread."""
    boot, size = bytes(BOOT_BYTES), 4 << 20
    head, seal = header(boot, 1, 1), Seal(b"benchmark", boot, boot)
    plain, sealed = memoryview(bytearray(PIECE)), memoryview(bytearray(PIECE + TAG_BYTES))

    def there_and_back() -> None:
        for _ in range(2 * size // PIECE):
            seal.close_into(head, 1, plain, sealed)
            seal.open_into(head, 1, sealed, plain)

    return min(_sequence(there_and_back, 1) for _ in range(20))


def _turns(
    contenders: dict[str, Callable[[], Any]],
    rounds: int,
    measure: Callable[[Callable[[], Any]], float],
    turn: Callable[[str], None] = lambda _: None,
) -> dict[str, list[float]]:
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        for name in names if number % 2 else names[::-1]:
            turn(name)
            taken = measure(contenders[name])
            if number:  # the first round warms up
                seen[name].append(taken)
    return seen


def _sequence(call: Callable[[], Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count * 1e6


def _flights(call: Callable[[], Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(max(1, count // 64)):
        for answer in [call() for _ in range(64)]:
            answer.wait()
    return (time.perf_counter() - began) / (max(1, count // 64) * 64) * 1e6


def ratios(seen: dict[str, list[float]], against: str) -> dict[str, dict[str, float]]:
    """Give each contender's median and the median of its ratio, round by round."""
    base = seen[against]
    return {
        name: {
            "median": round(statistics.median(values), 1),
            "ratio": round(
                statistics.median(one / other for one, other in zip(values, base, strict=True)), 3
            ),
        }
        for name, values in seen.items()
    }


def calls(rounds: int) -> dict[str, Any]:
    """Compare a call through a service with torch's rpc_sync and rpc_async, in turns of whole launches.

    Not in the same workers: threads of torch's agent spin, and would take a part of the cores from the others.
    """
    seen: dict[str, dict[str, list[float]]] = {}
    sealing = []
    for _ in range(rounds):
        sealing.append(time_sealing())
        for way in ("torch", "torch tcp", "ipc", "sealed tcp", "bare tcp"):
            for label, taken in paceline.launch(time_calls, way, workers=2, threads=1)[0].items():
                seen.setdefault(label, {}).setdefault(way, []).append(taken)
    rows = {label: ratios(found, "torch") for label, found in seen.items()}
    for label, row in rows.items():
        words = ", ".join(f"{name} {one['median']:.1f} us ({one['ratio']:.3f})" for name, one in row.items())
        across = statistics.median(
            one / other
            for one, other in zip(seen[label]["sealed tcp"], seen[label]["torch tcp"], strict=True)
        )
        row["sealed tcp"]["ratio to torch tcp"] = round(across, 3)
        print(f"  {label:18} {words}; sealed against torch over tcp {across:.3f}")
    alone = round(statistics.median(sealing), 1)
    print(f"  AES-GCM of 4 MB, sealed and opened there and back, without sending it: {alone:.1f} us")
    return {**rows, "AES-GCM of 4 MB, there and back": alone}


# Batches.


@remote.service
class Model:
    """A small recurrent model that writes 100 tokens, each from the one before: as greedy decoding does."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._embedding, self._cell, self._head = nn.Embedding(64, 64), nn.GRUCell(64, 64), nn.Linear(64, 64)

    @torch.no_grad()
    def _write(self, states: Tensor) -> Tensor:
        tokens = torch.zeros(len(states), dtype=torch.int64)
        for _ in range(100):
            states = self._cell(self._embedding(tokens), states)
            tokens = self._head(states).argmax(-1)
        return states

    def single(self, item: Tensor) -> Tensor:
        """Answer one call."""
        return self._write(item.unsqueeze(0))[0].clone()

    @remote.batched(max_size=8, max_wait_ms=10)
    def together(self, items: list[Tensor]) -> list[Tensor]:
        """Answer the calls of a batch."""
        return [one.clone() for one in self._write(torch.stack(items))]


def time_batches(session: remote.Session, rounds: int, callers: int = 8) -> dict[str, list[float]]:
    """Microseconds a call with 8 callers at once."""
    model, item = remote.create("server:0", Model), torch.ones(64)

    def crowd(call: Callable[[], Any]) -> float:
        threads = [threading.Thread(target=lambda: [call() for _ in range(12)]) for _ in range(callers)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.perf_counter() - began) / (12 * callers) * 1e6

    return _turns(
        {"single": lambda: model.single(item), "batched": lambda: model.together(item)}, rounds, crowd
    )


def batching(rounds: int) -> dict[str, Any]:
    """Compare 8 callers of a batched method with 8 of a plain one."""
    got = paceline.launch_roles(
        {"callers": remote.Role(time_batches, 1, args=(rounds,)), "servers": 1}, threads=1
    )
    row = ratios(got["callers"][0], "single")
    gain = round(1 / row["batched"]["ratio"], 2)
    alone, together = row["single"]["median"], row["batched"]["median"]
    print(f"  8 callers: {alone:.0f} us a call, batched {together:.0f} us: {gain} times the throughput")
    return {**row, "throughput": gain}


# Pipelines.


@remote.function
def first_half() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU())


@remote.function
def second_half() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="sum")


def _examples() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(512, 512), torch.randint(10, (512,))


def time_remote_pipeline(session: remote.Session, rounds: int) -> list[float]:
    """Milliseconds a step of 64 samples in 4 micro-batches."""
    pipeline = remote.Pipeline({"stage:0": first_half, "stage:1": second_half}, micro_batches=4)
    optimizer = pipeline.optimizer(torch.optim.SGD, lr=0.01)
    inputs, labels = _examples()
    return [
        _sequence(lambda: pipeline.step(inputs[:64], labels[:64], _losses, optimizer), 10) / 1e3
        for _ in range(rounds + 1)
    ][1:]


def time_pp(run: paceline.Run, rounds: int) -> list[float]:
    """The same with the strategy pp, its schedule gpipe."""
    data = torch.utils.data.TensorDataset(*_examples())
    engine_of(run).preparation.prepare_replica(
        lambda: nn.Sequential(*first_half(), *second_half()),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )
    steps = iter(run.steps(data, batch_size=64, steps=10 * (rounds + 1)))

    def take() -> None:
        step = next(steps)
        step.compute(lambda model, batch: paceline.Loss(_losses(model(batch[0]), batch[1]), len(batch[1])))

    return [_sequence(take, 10) / 1e3 for _ in range(rounds + 1)][1:]


def pipeline(rounds: int) -> dict[str, Any]:
    """Compare the pipeline over calls with the strategy pp, in turns of whole launches."""
    seen: dict[str, list[float]] = {"pp": [], "remote": []}
    for _ in range(3):
        got = paceline.launch_roles(
            {"master": remote.Role(time_remote_pipeline, 1, args=(rounds,)), "stages": 2}, threads=1
        )
        seen["remote"] += got["master"][0]
        tuning = Tuning(schedule="gpipe")
        seen["pp"] += paceline.launch(
            time_pp, rounds, workers=2, strategy="pp", shards=4, threads=1, tuning=tuning
        )[0]
    row = ratios(seen, "pp")
    pp, ours = row["pp"], row["remote"]
    print(
        f"  a step in 4 micro-batches: pp {pp['median']:.2f} ms, over calls {ours['median']:.2f} ms, {ours['ratio']:.2f}"
    )
    return row


# Servers.


def time_steps(run: paceline.Run, blocks: int) -> list[float]:
    """Milliseconds a step of a 5 M-parameter MLP; servers take the same steps."""
    case = CASES["mlp"]
    engine_of(run).preparation.prepare_replica(case.make_model, optimizer_for)
    steps = iter(run.steps(case.make_data(), batch_size=case.batch_size, steps=20 * (blocks + 1)))

    def take() -> None:
        step = next(steps)
        step.compute(lambda model, batch: paceline.Loss.mean(case.losses(model, batch)))

    return [_sequence(take, 20) / 1e3 for _ in range(blocks + 1)][1:]


def servers(rounds: int) -> dict[str, Any]:
    """Compare ps, together and with staleness 4, with ddp on as many trainers, in turns of whole launches."""
    found: dict[str, Any] = {}
    for trainers in (1, 2, 4):
        ways: dict[str, dict[str, Any]] = {
            "ddp": {"strategy": "ddp"},
            "ps": {"strategy": "ps", "servers": 1},
            "ps, staleness 4": {"strategy": "ps", "servers": 1, "tuning": Tuning(staleness=4)},
        }
        seen: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(2):
            for name, options in ways.items():
                results = paceline.launch(
                    time_steps, max(2, rounds // 2), workers=trainers, shards=trainers, threads=1, **options
                )
                seen[name] += results[0]
        found[f"{trainers} trainers"] = row = ratios(seen, "ddp")
        parts = ", ".join(f"{name} {one['median']:.2f} ms ({one['ratio']:.2f})" for name, one in row.items())
        print(f"  {trainers} trainers, a step of a 5 M-parameter MLP: {parts}")
    return found


def count_traffic(run: paceline.Run) -> dict[str, int] | None:
    """Train a table of 200,000 rows for 20 steps, and give what a trainer sent and received for it."""
    torch.manual_seed(0)
    ids, labels = torch.randint(200_000, (2560, 4)), torch.rand(2560, 1)
    engine_of(run).preparation.prepare_replica(
        lambda: nn.Sequential(nn.EmbeddingBag(200_000, 32, mode="sum", sparse=True), nn.Linear(32, 1)),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    for step in run.steps(torch.utils.data.TensorDataset(ids, labels), batch_size=128, steps=20):
        step.compute(lambda model, batch: paceline.Loss.mean((model(batch[0]) - batch[1]).square().flatten()))
    servers = getattr(engine_of(run).state.replica.placement, "servers", None)
    if servers is None:
        return None
    return {name: getattr(servers.traffic, name) for name in ("looked_up", "pushed", "dense")}


def traffic(rounds: int) -> dict[str, Any]:
    """Count the bytes of a sparse table on a server against those of sending the table whole."""
    results = paceline.launch(count_traffic, workers=2, shards=2, threads=1, strategy="hybrid", servers=1)
    counted = [one for one in results if one is not None]
    total = {name: sum(one[name] for one in counted) for name in counted[0]}
    sparse = total["looked_up"] + total["pushed"]
    print(
        f"  20 steps, a table of 200,000 rows: {sparse / 1e6:.2f} MB of touched rows, {total['dense'] / 1e6:.0f} MB if it went "
        f"whole: {sparse / total['dense']:.5f}"
    )
    return {**total, "ratio": round(sparse / total["dense"], 6)}


SECTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "calls": calls,
    "batching": batching,
    "servers": servers,
    "traffic": traffic,
    "pipeline": pipeline,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.only.split(","):
        print(name)
        results[name] = SECTIONS[name](options.rounds)
    if options.write:
        before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        about = {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pyzmq": zmq.__version__,
            "rounds": options.rounds,
        }
        RESULT.write_text(json.dumps({**before, **results, "about": about}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What an all-reduce costs over each backend, beside a copy in memory, and what a step of DDP does.

    python benchmarks/backends.py [--workers 2] [--sizes 1K,1M,64M] [--rounds 7] [--write]

The backends are those of paceline's table (`world/backends.py`); one that cannot be used here is left out with a word. The others
live in the same workers and take turns, another one first in every round: noise of the machine hits all alike, and what counts is
the ratio within a round. Where mpi is one of them the workers are started by mpiexec, else by themselves.
  latency       microseconds from the call to its end on rank 0
  bus bandwidth 2 (n - 1) / n of the tensor's bytes per second: what each worker sends and receives, whatever the algorithm
  memory        each worker copies as many bytes within its own memory, all at the same time: no exchange on a host can be faster
  DDP           a step of a 5 M-parameter MLP with torch's DistributedDataParallel, its group on the backend
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import CASES
from torch.nn.parallel import DistributedDataParallel

from paceline.world.backends import BACKENDS

RESULT = Path(__file__).with_name("results") / "backends.json"
SIZES = "1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
BLOCK_S = 0.05
"""How long a block of calls of one contender takes, about; one call at least."""
MEMORY = "memory"
AGAINST = "gloo"
_RANKS = (("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def absent(name: str, workers: int) -> str | None:
    """Say why a backend cannot be measured here; None where it can."""
    if name == "nccl" and not (dist.is_nccl_available() and torch.cuda.device_count() >= workers):
        return f"needs a GPU for each of {workers} workers, and there are {torch.cuda.device_count()}"
    if name == "mpi" and importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if name == "mpi" and mpiexec() is None:
        return "there is no mpiexec"
    return None


def mpiexec() -> str | None:
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def parse_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1].upper()]


# In a worker.


def make_groups(names: list[str]) -> dict[str, Any]:
    """Make one group of all workers over each backend."""
    groups: dict[str, Any] = {}
    for name in names:
        if name == "mpi":
            made = importlib.import_module("paceline.world.mpi.process_group").register()
            groups[name] = dist.new_group(backend=made)
        else:
            groups[name] = dist.group.WORLD if name == "gloo" else dist.new_group(backend=name)
    return groups


def device_of(name: str) -> torch.device:
    return torch.device("cuda", dist.get_rank()) if name == "nccl" else torch.device("cpu")


def turns(
    contenders: dict[str, Callable[[], None]], repeats: dict[str, int], rounds: int
) -> dict[str, list[float]]:
    """Time blocks of each contender in turn, seconds per call; the first round warms up."""
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        place = number % len(names)
        for name in names[place:] + names[:place]:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeats[name]):
                contenders[name]()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if number:
                seen[name].append((time.perf_counter() - began) / repeats[name])
    return seen


def repeats_for(contenders: dict[str, Callable[[], None]]) -> dict[str, int]:
    """Choose how many calls make a block; all workers take rank 0's numbers."""
    found = {}
    for name, call in contenders.items():
        call()
        began = time.perf_counter()
        call()
        found[name] = max(1, min(2000, int(BLOCK_S / max(time.perf_counter() - began, 1e-7))))
    agreed = [found]
    dist.broadcast_object_list(agreed)
    return agreed[0]


def reduction(name: str, group: Any, size: int) -> Callable[[], None]:
    """Return an all-reduce that has been checked once."""
    tensor = torch.full((size // 4,), float(dist.get_rank() + 1), device=device_of(name))
    dist.all_reduce(tensor, group=group)
    workers = dist.get_world_size()
    assert bool((tensor == workers * (workers + 1) / 2).all()), f"{name}: a wrong sum"
    tensor.zero_()  # sums of zeros stay zeros, however often they are taken
    return lambda: dist.all_reduce(tensor, group=group)


def copy(size: int) -> Callable[[], None]:
    source, target = torch.ones(size // 4), torch.empty(size // 4)

    def call() -> None:
        target.copy_(source)

    return call


def steps(name: str, group: Any) -> Iterator[None]:
    case, rank, size = CASES["mlp"], dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    device = device_of(name)
    model = DistributedDataParallel(
        case.make_model().to(device), process_group=group, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    share = case.batch_size // size
    batch = tuple(column[rank * share : (rank + 1) * share].to(device) for column in case.make_data().tensors)
    while True:
        optimizer.zero_grad(set_to_none=True)
        case.losses(model, batch).mean().backward()
        optimizer.step()
        yield


def work(names: list[str], sizes: list[int], rounds: int) -> dict[str, Any]:
    groups = make_groups(names)
    found: dict[str, Any] = {"all_reduce": {}, "ddp": {}}
    for size in sizes:
        contenders = {name: reduction(name, group, size) for name, group in groups.items()}
        contenders[MEMORY] = copy(size)
        found["all_reduce"][size] = turns(contenders, repeats_for(contenders), rounds)
    loops = {name: steps(name, group) for name, group in groups.items()}
    calls = {name: (lambda loop=loop: next(loop)) for name, loop in loops.items()}
    found["ddp"] = turns(calls, dict.fromkeys(calls, CASES["mlp"].steps), rounds)
    return found


def be_worker(options: argparse.Namespace) -> None:
    """Join the others, measure, and leave rank 0's numbers in a file."""
    rank, size = next((int(os.environ[a]), int(os.environ[b])) for a, b in _RANKS if a in os.environ)
    folder = Path(options.folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found = work(options.names.split(","), [*map(parse_size, options.sizes.split(","))], options.rounds)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# In the command.


def measure(options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Start the workers and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        given = ["--folder", folder, "--names", ",".join(names), "--sizes", options.sizes]
        command = [sys.executable, __file__, *given, "--rounds", str(options.rounds)]
        if "mpi" in names:
            subprocess.run([str(mpiexec()), "-n", str(options.workers), *command], check=True)
        else:
            started = [
                subprocess.Popen(
                    command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(options.workers)}
                )
                for rank in range(options.workers)
            ]
            statuses = [one.wait() for one in started]
            assert not any(statuses), f"workers ended with {statuses}"
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        return found


def row(seen: dict[str, list[float]], moved: dict[str, float]) -> dict[str, dict[str, float]]:
    """Give each contender's median, its bandwidth, and the median over the rounds of its time against gloo's."""
    return {
        name: {
            "us": round(statistics.median(times) * 1e6, 2),
            "ratio": round(statistics.median(a / b for a, b in zip(times, seen[AGAINST], strict=True)), 3),
            **({"gb_s": round(moved[name] / statistics.median(times) / 1e9, 3)} if name in moved else {}),
        }
        for name, times in seen.items()
    }


def show(title: str, found: dict[str, dict[str, float]]) -> None:
    parts = []
    for name, one in found.items():
        bandwidth = f" {one['gb_s']:.2f} GB/s" if "gb_s" in one else ""
        parts.append(f"{name} {one['us']:.1f} us{bandwidth} ({one['ratio']:.2f})")
    print(f"  {title:>8}  {', '.join(parts)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--names", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        be_worker(options)
        return
    skipped = {name: why for name in BACKENDS if (why := absent(name, options.workers)) is not None}
    skipped |= {} if "mpi" in BACKENDS else {"mpi": "this paceline has no such backend"}
    for name, why in skipped.items():
        print(f"{name} is left out: {why}")
    found = measure(options, [name for name in BACKENDS if name not in skipped])
    results: dict[str, Any] = {"all_reduce": {}}
    print(f"all-reduce between {options.workers} workers, and its time against {AGAINST}'s")
    share = 2 * (options.workers - 1) / options.workers
    for text in options.sizes.split(","):
        size = parse_size(text)
        seen = found["all_reduce"][str(size)]
        moved = {name: size * (1 if name == MEMORY else share) for name in seen}
        results["all_reduce"][text] = row(seen, moved)
        show(text, results["all_reduce"][text])
    results["ddp"] = row(found["ddp"], {})
    print("a step of DDP, 5 M parameters")
    show("mlp", results["ddp"])
    if options.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(
            json.dumps({**results, "skipped": skipped, "about": about(options)}, indent=1) + "\n"
        )


def about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi4py": version("mpi4py"),
        "mpich": version("mpich"),
        "workers": options.workers,
        "threads": 1,
        "rounds": options.rounds,
    }


def version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()

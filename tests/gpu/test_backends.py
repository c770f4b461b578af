"""The backends with CUDA tensors on one GPU: nccl alone, gloo between two workers, MPI between two ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.cli import tour
from paceline.training import trainer
from paceline.transport.store import RunStore
from paceline.transport.store_server import StoreServer
from paceline.world import join
from paceline.world.backends import NCCL
from paceline.world.env import Identity
from paceline.world.interruption import Interruption
from paceline.world.process_group import Patience
from tests.gpu import mpi_ranks
from tests.gpu.mpi_ranks import DEVICE, SPEC
from tests.patience import HANG_S

MPIEXEC = Path(sys.executable).with_name("mpiexec")
WITHOUT_TIMES = [name for name in tour.STOPS if name != "barrier"]
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")
without_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists(),
    reason="the extra mpi (mpi4py and mpich) is not installed here",
)


@pytest.fixture(scope="module")
def single() -> str:
    """The weights of one process on this GPU."""
    (told,) = paceline.launch(trainer.main, SPEC, strategy="single", shards=4, device="cuda")
    weights: str = told["weights_sha256"]
    return weights


@pytest.fixture(scope="module")
def toured() -> list[dict[str, Any]]:
    """What two workers on the CPU saw of each operation."""
    told = paceline.launch(tour.main, WITHOUT_TIMES, workers=2, device="cpu", threads=1)[0]
    operations: list[dict[str, Any]] = told["operations"]
    return operations


def enter_nccl(address: str) -> Any:
    """Make a group of one on nccl, which a world of one does without, at a store of ours."""
    identity = Identity(rank=0, size=1, local_rank=0, local_size=1)
    join._choose_interface(identity)
    patience = Patience(join.timedelta(seconds=60), join.timedelta(seconds=60))
    return join._join_group(identity, RunStore(address), NCCL, patience, "0", Interruption())


def alone_on_nccl(run: paceline.Run, address: str) -> dict[str, Any]:
    comm = enter_nccl(address)
    try:
        made = {
            "backend": str(dist.get_backend_config(comm.group)),
            "engines": [same(wrap) for wrap in ENGINES],
        }
        for place in ("cuda", "cpu"):
            device = torch.device(place)
            # Nobody may send to itself.
            names = [name for name in tour.STOPS if name not in ("send_recv", "barrier")]
            made[place] = {name: tour.STOPS[name].show(comm, device) for name in names}
            tour.STOPS["barrier"].show(comm, device)
        expected = torch.arange(1 << 20, dtype=torch.float32, device=run.world.device)
        value = expected.clone()
        pending = comm.all_reduce_(value.add_(1).sub_(1), "mean")
        made["in place"] = torch.equal(pending.wait(), expected)
        return made
    finally:
        dist.destroy_process_group()


def sharded(model: nn.Sequential) -> nn.Module:
    for one in model:
        fully_shard(one)
    return fully_shard(model)


ENGINES = (DistributedDataParallel, sharded)


def same(wrap: Any) -> bool:
    """Return whether an engine of torch's on that group gives the gradients of the bare model, to the bit."""
    gradients = []
    for wrapped in (lambda model: model, wrap):
        torch.manual_seed(1)
        model = wrapped(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6)).to(DEVICE))
        model(torch.ones(4, 8, device=DEVICE)).pow(2).mean().backward()
        found = [one.grad for one in model.parameters()]
        gradients.append([one.full_tensor() if hasattr(one, "full_tensor") else one for one in found])
    return all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_nccl_in_a_group_of_one_at_our_own_store(tmp_path: Path) -> None:
    server = StoreServer(f"ipc://{tmp_path}/store")
    try:
        (made,) = paceline.launch(alone_on_nccl, server.address, strategy="single", device="cuda")
    finally:
        server.close()
    assert "nccl" in made["backend"]
    assert made["engines"] == [True, True]
    assert made["in place"]
    for place in ("cuda", "cpu"):
        for name, (before, after) in made[place].items():
            assert after == before, (place, name)


def test_training_on_one_worker_of_nccl_has_the_bits_of_single(single: str) -> None:
    (told,) = paceline.launch(
        trainer.main, SPEC, strategy="ddp", workers=1, shards=4, backend="nccl", device="cuda"
    )
    assert told["weights_sha256"] == single


def test_gloo_carries_cuda_tensors_between_two_workers(toured: list[dict[str, Any]]) -> None:
    told = paceline.launch(
        tour.main, WITHOUT_TIMES, workers=2, backend="gloo", device="cuda", check_collectives=True
    )[0]
    assert (told["backend"], told["device"]) == ("gloo", "cuda")
    assert told["operations"] == toured


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_over_gloo_on_one_gpu_has_the_bits_of_single(strategy: str, single: str) -> None:
    told = paceline.launch(
        trainer.main,
        SPEC,
        strategy=strategy,
        workers=2,
        shards=4,
        backend="gloo",
        transport="gloo",
        device="cuda",
    )[0]
    assert (told["workers"], told["weights_sha256"]) == (2, single)


@without_mpi
def test_two_ranks_of_mpi_on_one_gpu(single: str, toured: list[dict[str, Any]], tmp_path: Path) -> None:
    ended = subprocess.run(
        [str(MPIEXEC), "-n", "2", sys.executable, "-m", mpi_ranks.__name__, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,  # mpiexec reads for rank 0
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # MPICH's wheel takes no memory of a GPU, other libraries may: one line says which.
    assert ended.stderr.count("note: CUDA tensors go ") == 1
    for rank in range(2):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told["trained"] == [2, "mpi", single]
        assert told["toured"]["operations"] == toured
        assert (told["toured"]["backend"], told["toured"]["device"]) == ("mpi", "cuda")
        assert told["checked"] == [check.__name__ for check in mpi_ranks.CHECKS]

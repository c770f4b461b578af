"""What every rank of MPI does on a GPU that they share: `mpiexec -n 2 python -m tests.gpu.mpi_ranks FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from paceline.cli import tour
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from paceline.world import env
from tests.dist.world.mpi_checks import MOVED, bits, held

DEVICE = "cuda"
SPEC = TrainSpec(task="paceline.tasks.digits:Digits", name="it", steps=8)


def every_type_is_moved_and_added_as_on_the_host(world: paceline.World) -> None:
    for dtype in MOVED:
        found = []
        for device in (DEVICE, "cpu"):
            value = held(world.rank, dtype).to(device)
            total, parts = value.clone(), [torch.zeros_like(value) for _ in range(world.size)]
            dist.all_reduce(total)
            dist.all_gather(parts, value)
            work = dist.irecv(value, src=(world.rank - 1) % world.size)
            dist.send(parts[world.rank], dst=(world.rank + 1) % world.size)
            work.wait()
            assert {one.device.type for one in (total, value, *parts)} == {torch.device(device).type}
            found.append([bits(one.cpu()) for one in (total, value, *parts)])
        assert found[0] == found[1], dtype


def what_the_stream_has_yet_to_write_is_waited_for(world: paceline.World) -> None:
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        value = torch.ones(1 << 22, device=DEVICE)
        for _ in range(50):
            value.add_(1.0)
        work = dist.all_reduce(value, async_op=True)
        work.wait()
        value.mul_(2.0)
    beside.synchronize()
    assert value.unique().tolist() == [102.0 * world.size]


def parts_of_a_tensor_are_written_in_place(world: paceline.World) -> None:
    whole = torch.zeros(4, 6, device=DEVICE)
    whole[:, 2].fill_(world.rank + 1.0)
    dist.all_reduce(whole[:, 2])
    assert whole[:, 2].tolist() == [world.size * (world.size + 1) / 2] * 4
    assert whole.sum().item() == whole[:, 2].sum().item()


CHECKS = (
    every_type_is_moved_and_added_as_on_the_host,
    what_the_stream_has_yet_to_write_is_waited_for,
    parts_of_a_tensor_are_written_in_place,
)


def check_all(run: paceline.Run) -> list[str]:
    """Run the checks, and return which were run."""
    for check in CHECKS:
        check(run.world)
    return [check.__name__ for check in CHECKS]


def main() -> None:
    """Train, run the tour of the operations and the checks, and write down what came of each."""
    asked = {"backend": "mpi", "device": DEVICE}
    (trained,) = paceline.launch(trainer.main, SPEC, shards=4, transport="gloo", **asked)
    (toured,) = paceline.launch(tour.main, [name for name in tour.STOPS if name != "barrier"], **asked)
    (checked,) = paceline.launch(check_all, **asked)
    told = {
        "trained": [trained["workers"], trained["transport"], trained["weights_sha256"]],
        "toured": toured,
        "checked": checked,
    }
    identity = env.identity()
    assert identity is not None
    Path(sys.argv[1], f"told-{identity.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()

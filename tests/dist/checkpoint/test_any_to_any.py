"""A checkpoint of any strategy is resumed under any other: the same bits after the move, the same answer at the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.checkpoint import load
from paceline.checkpoint.compare import same
from paceline.training import trainer
from paceline.training.options import RunOptions
from paceline.training.reference import load_task
from paceline.world import World, all_gather_object
from paceline.world.mesh import Mesh
from tests.contract.jobs import HALFWAY, UNMEASURED, WHOLE
from tests.contract.strategies import SHARDS


@dataclass(frozen=True)
class Way:
    """One way to train."""

    strategy: str
    workers: int
    parts: int
    """How many workers hold something that no other holds, or the first one if none does."""
    bitwise: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join(map(str, (self.strategy, self.workers, *self.options)))


LONGER = replace(WHOLE, steps=HALFWAY + 2, settings={**WHOLE.settings, **UNMEASURED})
HALF = replace(LONGER, steps=HALFWAY)

WAYS = [
    Way("single", 1, parts=1),
    Way("ddp", 3, parts=1),
    Way("ddp", 2, parts=2, options={"tuning": {"shard_optimizer": True}}),
    Way("fsdp", 4, parts=4),
    Way("fsdp", 2, parts=2),
    Way("ddp=2,fsdp=2", 4, parts=2),
    Way("tp", 2, parts=2, bitwise=False),
    Way("pp", 2, parts=2),
]
NAMES = [way.name for way in WAYS]


Ended = dict[tuple[str, str], list[tuple[bool, dict[str, Any]]]]


def all_pairs(run: paceline.Run, folder: Path) -> tuple[str, Ended]:
    """Begin under each strategy, go on under each; in one launch, of which the first workers make up each group."""
    for way in WAYS:
        group(run, way, begin, folder / way.name)
    straight = group(run, WAYS[0], begin_to_end)
    ended = {}
    for after in WAYS:
        for before in WAYS:
            out = folder / f"{before.name}-to-{after.name}"
            if run.world.is_first:
                shutil.copytree(folder / before.name, out)
            run.world.comm.barrier()
            ended[before.name, after.name] = group(run, after, go_on, out)
    return str(straight[0]), ended


def group(run: paceline.Run, way: Way, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function in the first workers, as many as a way takes, and give what each of them says."""
    inside = run.world.rank < way.workers
    comm = run.world.comm.split(0 if inside else None)
    said = None
    if comm is not None:
        world = replace(run.world, size=way.workers, comm=comm, mesh=Mesh(()))
        options = replace(
            run._engine.state.options, strategy=way.strategy, workers=way.workers, **way.options
        )
        said = function(world, options, *arguments)
    return list(all_gather_object(run.world.comm, said)[: way.workers])


def begin(world: World, options: RunOptions, out: Path) -> None:
    """Train the first half."""
    trainer.main(paceline.Run(world, replace(options, out=out)), HALF.spec())


def begin_to_end(world: World, options: RunOptions) -> str:
    """Train without a pause."""
    return str(trainer.main(paceline.Run(world, options), LONGER.spec())["weights_sha256"])


def go_on(world: World, options: RunOptions, out: Path) -> tuple[bool, dict[str, Any]]:
    """Take a run up again: say whether its state is what was saved, and how it ends."""
    options = replace(options, out=out, resume=True)
    before = load(out / "checkpoints" / f"step-{HALFWAY}").state
    moved = paceline.Run(world, options)
    trainer.Trainer(load_task(LONGER.spec().task, LONGER.settings), LONGER.spec(), moved).prepare()
    state = moved._engine.state.replica.state()
    equal = same(state, {key: before[key] for key in state})
    return equal, trainer.main(paceline.Run(world, options), LONGER.spec())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Ended]:
    """Give the folder of all runs, the weights of one process that was never interrupted, and how all others ended."""
    folder = tmp_path_factory.mktemp("any-to-any")
    most = max(way.workers for way in WAYS)
    # Each group has a strategy of its own; with this one, what several of them need is loaded once for all workers.
    told = paceline.launch(
        all_pairs,
        folder,
        strategy="fsdp",
        workers=most,
        shards=SHARDS,
        threads=1,
        device="cpu",
        hang_timeout=600,
    )
    return folder, *told[0]


@pytest.mark.parametrize("after", WAYS, ids=NAMES)
@pytest.mark.parametrize("before", WAYS, ids=NAMES)
def test_every_pair(trained: tuple[Path, str, Ended], before: Way, after: Way) -> None:
    _, straight, ended = trained
    told = ended[before.name, after.name]
    assert len(told) == after.workers
    for equal, result in told:
        assert equal, "weights and optimizer state differ after the move"
        assert result["steps"] == LONGER.steps
        assert result["samples"] == 61 + 3 * 8
        if before.bitwise and after.bitwise:
            assert result["weights_sha256"] == straight
    assert len({result["weights_sha256"] for _, result in told}) == 1


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_every_worker_writes_what_it_alone_holds(trained: tuple[Path, str, Ended], way: Way) -> None:
    path = trained[0] / way.name / "checkpoints" / f"step-{HALFWAY}"
    assert len(list(path.glob("part-*.safetensors"))) == way.parts

"""Workers write a checkpoint together: each its part, whole or not at all, now or beside the training."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import load, planning, weights_sha256
from paceline.checkpoint.compare import same
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.parts import StoredTensors
from paceline.checkpoint.pending_checkpoint import Fault
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import find_newest
from paceline.state.chunks import ChunkBounds, assemble
from paceline.world import World, fault_points
from tests.checkpoints import Checkpoints
from tests.dist.checkpoint.cut import REST, held, moment, rows, whole
from tests.workers import run_workers


def model(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key[6:]: value for key, value in tensors.items() if key.startswith("model/")}


def assert_holds(path: Path, step: int, parts: int, add: float = 0.0) -> None:
    loaded = load(path)
    tensors = whole(add)
    assert same(
        loaded.state, assemble(tensors, REST) | {"position": moment(step).position, "meta": moment(step).meta}
    )
    manifest = Manifest.read(path)
    assert len(manifest.parts) == parts
    assert manifest.weights_sha256 == weights_sha256(model(tensors))
    assert {file.name for file in path.iterdir()} == {*manifest.files, "manifest.json"}


def save_all(world: World, folder: Path, cut: bool, background: bool, alone: int) -> list[str]:
    """Save three steps, changing everything in place as soon as the saver gives it back."""
    planning.ALONE = alone
    told: list[str] = []
    saver = Saver(
        Checkpoints(folder, keep=2), saved=lambda made: told.append(made.weights_sha256), note=told.append
    )
    for step in (1, 2, 3):
        mine = held(world.rank, world.size, cut=cut, add=step)
        assert not saver.save(world, mine, moment(step), background=background)
        for chunk in mine.chunks.values():
            chunk.values.zero_()
    saver.wait()
    assert not saver.save(world, held(world.rank, world.size, cut=cut), moment(3), unless_saved=True)
    saver.close()
    return told


WAYS = [
    (cut, background, alone)
    for cut in (False, True)
    for background in (False, True)
    for alone in (0, 1 << 20)
]
"""Cut up or not, in the background or not, and how little the first worker writes alone."""


def save_in_all_ways(world: World, folder: Path) -> list[list[str]]:
    return [save_all(world, folder / str(number), *way) for number, way in enumerate(WAYS)]


def test_every_worker_writes_its_part(tmp_path: Path) -> None:
    told = run_workers(save_in_all_ways, 3, tmp_path)
    for number, (cut, _, alone) in enumerate(WAYS):
        folder = tmp_path / str(number)
        assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3"]
        for step in (2, 3):
            assert_holds(folder / f"step-{step}", step, parts=3 if cut or not alone else 1, add=step)
    digests = [weights_sha256(model(whole(step))) for step in (1, 2, 3)]
    assert told == [[digests] * len(WAYS)] + [[[]] * len(WAYS)] * 2


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the checkpoints of three workers that hold their rows each; nobody may change them."""
    folder = tmp_path_factory.mktemp("sharded")
    run_workers(save_all, 3, folder, True, False, 0)
    return folder


def read_part(world: World, folder: Path) -> dict[str, torch.Tensor]:
    found = find_newest(world, Checkpoints(folder), lambda path, reason: pytest.fail(f"{path}: {reason}"))
    assert found is not None
    with found.open() as parts:
        assert same(found.extra_state, REST)
        return {
            key: parts.read(
                key,
                rows(meta, world.rank, world.size) if len(meta.shape) == 2 else ChunkBounds.whole(meta.shape),
            )
            for key, meta in parts.catalogue.items()
        }


def test_chunks_are_cut_anew_when_read(sharded: Path) -> None:
    for rank, got in enumerate(run_workers(read_part, 2, sharded)):
        mine = held(rank, 2, cut=True, add=3)
        assert same(got, {key: chunk.values for key, chunk in mine.chunks.items()})


@pytest.mark.parametrize("side", [0, 1])
def test_any_box_of_what_is_cut_by_rows_can_be_read(sharded: Path, side: int) -> None:
    path = sharded / "step-3"
    table = whole(3)["model/table"]
    with StoredTensors(path, Manifest.read(path)) as parts:
        for start in range(table.shape[side]):
            for length in range(table.shape[side] - start + 1):
                offset, shape = [0, 0], list(table.shape)
                offset[side], shape[side] = start, length
                bounds = ChunkBounds(tuple(offset), tuple(shape))
                assert torch.equal(parts.read("model/table", bounds), bounds.of(table))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_itself_reads_it(sharded: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from paceline.checkpoint.distributed import PartsReader

    state = {key: torch.zeros_like(value) for key, value in whole().items()}
    dcp.load(state, storage_reader=PartsReader(sharded / "step-3"), no_dist=True)
    assert same(state, whole(3))


# What goes wrong.


def save_blind(world: World, folder: Path, elsewhere: Path, cut: bool) -> tuple[str, bool]:
    """Save where the last worker is in another folder, as one on another machine would be."""
    planning.ALONE = 0
    os.chdir(elsewhere if world.rank == world.size - 1 else folder)
    fault = Saver(Checkpoints(Path("checkpoints"))).save(
        world, held(world.rank, world.size, cut=cut), moment(1)
    )
    return fault.message, fault.disk


def test_a_worker_that_does_not_see_the_folder(tmp_path: Path) -> None:
    for name in ("run", "elsewhere"):
        (tmp_path / name).mkdir()
    told = run_workers(save_blind, 3, tmp_path / "run", tmp_path / "elsewhere", False)
    assert told == [("", False)] * 3
    assert_holds(tmp_path / "run" / "checkpoints" / "step-1", 1, parts=2)
    told = run_workers(save_blind, 3, tmp_path / "run", tmp_path / "elsewhere", True)
    assert len(set(told)) == 1
    message, disk = told[0]
    assert message.startswith("rank 2 on ")
    assert (
        "does not see the folder of the run, and alone holds model/table and 1 more. Put --out on" in message
    )
    assert not disk
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]


def save_on_small_disk(world: World, folder: Path) -> tuple[list[Fault], list[str]]:
    """Have the kernel refuse the writes of the second worker: now, in the background, and the seal as well."""
    notes: list[str] = []
    faults: list[Fault] = []
    saver = Saver(Checkpoints(folder), note=notes.append)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for step, background, size in (
        (1, False, hard),
        (2, False, 500),
        (3, True, 500),
        (4, True, 10),
        (5, True, hard),
    ):
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        mine = held(world.rank, world.size, cut=True)
        faults.append(saver.save(world, mine, moment(step), background=background))
        saver.wait()
    saver.close()
    return faults, notes


def test_a_disk_that_fails_under_one_worker(tmp_path: Path) -> None:
    (faults, notes), (others, nothing) = run_workers(save_on_small_disk, 2, tmp_path)
    assert faults == others
    assert faults[1].message.startswith(f"cannot write {tmp_path / 'step-2'}: File too large. ")
    assert faults[1].disk
    assert not any(faults[:1] + faults[2:])
    assert notes[0].startswith(f"cannot write {tmp_path / 'step-3'}: File too large. ")
    assert notes[1].startswith(f"cannot write {tmp_path / 'step-4'}: ")
    assert all(note.endswith("the next checkpoint is tried when it is due.") for note in notes)
    assert (len(notes), nothing) == (2, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-5"]


def save_what_is_lost(world: World, folder: Path) -> Fault:
    """Save while somebody empties the second worker's file under its hands."""
    if world.rank == 1:
        fault_points.set_fault(
            lambda _: [os.truncate(path, 0) for path in folder.glob(".*/part-1.*")] and None
        )
    fault = Saver(Checkpoints(folder)).save(world, held(world.rank, world.size, cut=True), moment(1))
    fault_points.set_fault(None)
    return fault


def test_a_part_that_cannot_be_read_again_is_not_committed(tmp_path: Path) -> None:
    first, second = run_workers(save_what_is_lost, 2, tmp_path)
    assert first == second
    assert first.message.startswith("part-1.safetensors does not hold model/")
    assert list(tmp_path.iterdir()) == []


def save_and_regroup(world: World, folder: Path) -> list[list[str]]:
    return [abandon(world, folder / "held-up", sealed=False), abandon(world, folder / "sealed", sealed=True)]


def abandon(world: World, folder: Path, *, sealed: bool) -> list[str]:
    """Abandon a save while the second worker is held up in writing its part, or after it has written it."""
    notes: list[str] = []
    saver = Saver(Checkpoints(folder), note=notes.append, saved=lambda made: notes.append(made.path.name))
    go_on = threading.Event()
    if world.rank == 1 and not sealed:
        fault_points.set_fault(lambda _: go_on.wait(30) and None)
    saver.save(world, held(world.rank, world.size, cut=True), moment(1), background=True)
    if sealed and world.rank == 1:
        saver.wait()
    world.comm.barrier()
    saver.abandon()
    if world.is_first:
        saver.wait()
    world.comm.barrier()
    go_on.set()
    saver.close()
    fault_points.set_fault(None)
    return notes


def test_a_save_is_given_up_with_the_group_unless_all_parts_are_there(tmp_path: Path) -> None:
    first, second = run_workers(save_and_regroup, 2, tmp_path)
    assert first[0][0].startswith("the checkpoint of step 1 was given up: the group changed")
    assert (first[0][1:], first[1], second) == ([], ["step-1"], [[], []])
    assert list((tmp_path / "held-up").iterdir()) == []
    assert_holds(tmp_path / "sealed" / "step-1", 1, parts=2)


def save_other_state(world: World, folder: Path) -> list[tuple[str, bool]]:
    """Save a step once more, in another run's folder too: a change of one's own replaces what is there, another's does not."""
    own, other = Saver(Checkpoints(folder)), Saver(Checkpoints(folder))
    faults = []
    for saver, add, background in (
        (own, 1, False),
        (own, 1, False),
        (own, 0, True),
        (own, 0, False),
        (other, 2, True),
        (other, 0, False),
    ):
        mine = held(world.rank, world.size, cut=True, add=add)
        faults.append(saver.save(world, mine, moment(1), background=background))
    own.close()
    other.close()
    return [(fault.message, fault.disk) for fault in faults]


def test_another_state_under_the_same_step_is_told_to_all_by_the_next_call(tmp_path: Path) -> None:
    told = run_workers(save_other_state, 2, tmp_path)
    assert told[0] == told[1]
    says = f"{tmp_path / 'step-1'} is there already and holds another state. Resume that run, or choose another folder."
    assert told[0] == [*[("", False)] * 5, (says, False)]
    assert_holds(tmp_path / "step-1", 1, parts=2)


# Finding.


def find(world: World, folder: Path) -> tuple[int | None, list[str]]:
    reasons: list[str] = []
    found = find_newest(world, Checkpoints(folder), lambda path, reason: reasons.append(reason))
    return None if found is None else found.manifest.step, reasons


def damage_part(path: Path) -> str:
    """Change one bit."""
    content = bytearray((path / "part-1.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "part-1.safetensors").write_bytes(content)
    return "part-1.safetensors: sha256 differs"


def lose_part(path: Path) -> str:
    (path / "part-2.safetensors").unlink()
    return f"{path.name} needs 3 parts and has 2: part-2.safetensors is missing"


@pytest.mark.parametrize("damage", [damage_part, lose_part])
def test_the_newest_whole_one_is_found_together(
    sharded: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    shutil.copytree(sharded, tmp_path, dirs_exist_ok=True)
    reason = damage(tmp_path / "step-3")
    told = run_workers(find, 2, tmp_path)
    assert told == [(2, [reason]), (2, [])]
    damage(tmp_path / "step-2")
    assert [step for step, _ in run_workers(find, 2, tmp_path)] == [None, None]


def find_blind(world: World, folder: Path, elsewhere: Path) -> str:
    os.chdir(elsewhere if world.rank else folder)
    try:
        find_newest(world, Checkpoints(Path()), lambda path, reason: pytest.fail(reason))
    except planning.CheckpointError as error:
        return str(error)
    return ""


def test_a_worker_that_does_not_see_the_checkpoint_is_named(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    told = run_workers(find_blind, 2, sharded, tmp_path / "there")
    assert told[0] == told[1]
    assert "rank 1 on " in told[0]
    assert "does not see step-3. Put --out on a disk that all machines share." in told[0]

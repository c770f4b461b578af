"""One rank that takes torch's tests one after the other, each in a group of its own."""

from __future__ import annotations

import json
import os
import shutil
import sys
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed import distributed_test

from tests.torch_suite.__main__ import OPERATION_S


class Suite(distributed_test.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
    """torch's tests, in processes that are there already."""

    rank = 0
    world_size = 1
    file_name = ""


def names() -> list[str]:
    """Return the names of all tests."""
    return [name for name in unittest.TestLoader().getTestCaseNames(Suite) if callable(getattr(Suite, name))]


def run(chosen: list[str], told: Path) -> None:
    """Take the tests in order; rank 0 writes down what became of each. End with the first that fails on any rank."""
    from paceline.world.mpi import library, process_group

    mpi = library.load()
    world = mpi.COMM_WORLD
    Suite.rank, Suite.world_size = world.Get_rank(), world.Get_size()
    backend = process_group.register()
    os.environ["BACKEND"] = "mpi"  # torch looks again, for tests that need 8 ranks on everything else
    folder = Path(os.environ["TEMP_DIR"])
    for number, name in enumerate(chosen):
        _clean(folder, world, number)
        Suite.file_name = str(folder / f"store-{number}")
        dist.init_process_group(
            backend,
            init_method=f"file://{Suite.file_name}",
            rank=Suite.rank,
            world_size=Suite.world_size,
            timeout=timedelta(seconds=OPERATION_S),
        )
        outcome, why = _try(name)
        outcomes = world.allgather((outcome, why))
        ends = not all(world.allgather(library.is_healthy()))
        failed = [one for one in outcomes if one[0] == "failed"]
        skipped = [one for one in outcomes if one[0] == "skipped"]
        outcome, why = (failed or skipped or outcomes)[0]
        if Suite.rank == 0:
            with told.open("a") as file:
                file.write(
                    json.dumps({"test": name, "outcome": outcome, "why": why, "ends": ends or bool(failed)})
                    + "\n"
                )
        if failed or ends:
            library.abandon()
            sys.stdout.flush()
            os._exit(0)
        if dist.is_initialized():
            dist.destroy_process_group()


def _clean(folder: Path, world: Any, number: int) -> None:
    """Give each test the folders that torch's own runner gives it."""
    world.Barrier()
    if Suite.rank == 0:
        for name in ("barrier", "test_dir", "init_dir"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir()
    world.Barrier()
    distributed_test.Barrier.init()
    torch.manual_seed(number)


def _try(name: str) -> tuple[str, str]:
    codes = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    test = Suite(name)
    try:
        test.setUp()
        getattr(test, name)()
        test.tearDown()
        test.doCleanups()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        return ("skipped", codes[end.code]) if end.code in codes else ("failed", f"exit status {end.code}")
    except Exception as error:  # noqa: BLE001  (what a test may fail with)
        text = " ".join(str(error).split())
        return "failed", f"{type(error).__name__}: {text}"
    return "passed", ""

"""A process of its own with another hash seed: what iterates over a set shows itself there, and nowhere else.

Workers of one launcher are forked from one interpreter and share its hash seed, so strings hash alike in all of
them; on another machine, or tomorrow, they do not. Run as `python -m paceline.verify.proof.fresh FILE`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from paceline.compat import pickles
from paceline.compat.parent_death import die_with_parent
from paceline.launch.workers import fork_server as forkserver
from paceline.training.task_folder import Neighbours
from paceline.verify.proof.record import Record, Watching
from paceline.verify.proof.request import REFERENCE, VerifyRequest
from paceline.world import env

STEPS = 2
_HASH_SEEDS = ("1", "2")


class FreshRun:
    """The first steps of the reference, taken in a fresh interpreter beside everything else."""

    def __init__(self, request: VerifyRequest, folder: Path) -> None:
        self._answer = folder / "fresh-answer.pickle"
        question = folder / "fresh-question.pickle"
        spec = replace(request.spec, steps=min(STEPS, request.spec.steps or STEPS))
        question.write_bytes(
            pickles.dumps(
                (
                    replace(request, spec=spec),
                    forkserver.search_path(),
                    Neighbours.here(),
                    sys.argv,
                    str(self._answer),
                    os.getpid(),
                )
            )
        )
        self._errors = (folder / "fresh-errors.txt").open("wb+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.verify.proof.fresh", str(question)],
            env={**env.snapshot(), "PYTHONHASHSEED": _another_seed()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    @cached_property
    def answer(self) -> tuple[Record | None, str]:
        """Its record, waited for; or None and the last line of what went wrong."""
        status = self._process.wait()
        if status == 0:
            made: Record = pickle.loads(self._answer.read_bytes())  # noqa: S301  (written by our own process)
            return made, ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return None, lines[-1] if lines else f"exit status {status}"

    def close(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def _another_seed() -> str:
    """Return a hash seed that this process does not have."""
    return next(seed for seed in _HASH_SEEDS if seed != env.read("PYTHONHASHSEED"))


def _main(path: str) -> None:
    import torch

    question = Path(path)
    request, search_path, neighbours, arguments, answer, parent = pickle.loads(question.read_bytes())  # noqa: S301  (from our own launcher)
    die_with_parent(parent)
    sys.path[:], sys.argv[:] = search_path, arguments
    neighbours.adopt()
    from paceline.training.run import Run, engine_of
    from paceline.verify.proof import recording
    from paceline.world import alone
    from paceline.world.env import Identity

    torch.set_num_threads(request.worker_threads)
    # The same variables as a worker of one process has, so that nothing but the hash seed is another.
    env.export(Identity(rank=0, size=1, local_rank=0, local_size=1).variables())
    options = request.options(REFERENCE)
    run = Run(alone(options.device), options)
    try:
        record = recording.main(run, request.spec, Watching(epochs=request.epochs))
    finally:
        engine_of(run).close()
    Path(answer).write_bytes(pickles.dumps(record))


if __name__ == "__main__":
    _main(sys.argv[1])

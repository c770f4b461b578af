"""What is to be verified: a task, and the strategies and numbers of workers to hold it to. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline import strategies
from paceline.errors import InputError
from paceline.option_fields import Options, ranged
from paceline.ranges import COUNT, SHARDS, THREADS, WORKERS
from paceline.strategies.tuning import Tuning, serves
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec
from paceline.verify.proof.bounds import SENT
from paceline.world import env
from paceline.world.mesh import DATA


@dataclass(frozen=True)
class Candidate:
    """One strategy on one number of workers."""

    strategy: str
    workers: int

    def __str__(self) -> str:
        return f"{self.strategy} x {self.workers}"


@dataclass(frozen=True, kw_only=True)
class VerifyRequest(Options):
    """What `paceline verify` was asked for."""

    spec: TrainSpec
    strategies: tuple[str, ...] = ("ddp", "dp")
    workers: tuple[int, ...] = ranged((1, 2), WORKERS)
    shards: int | None = ranged(None, SHARDS)
    threads: int | None = ranged(None, THREADS)
    hash_seed: bool = True
    """Whether to take the first steps in a process with another hash seed as well, which has to load torch anew."""
    epochs: int | None = ranged(None, COUNT)
    """What a schedule is laid out for, as `train --epochs` does it; None is the task's."""
    resume: bool = True
    """Whether to save in mid-run as well, and to resume with another strategy or number of workers."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other options of every run, by their names in `RunOptions`."""
    tuning: Mapping[str, Any] = field(default_factory=dict)
    """Options of single strategies; each candidate gets those that mean something to it, the reference none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Tuning.made(self.tuning)
        if not self.strategies or not self.workers:
            raise InputError("nothing to verify: give at least one --strategy and one number of --workers.")
        if self.spec.steps is None:
            raise InputError("verify needs a number of steps. Give --steps.")
        for strategy in self.strategies:
            strategies.entry(strategy)

    @property
    def total_shards(self) -> int:
        """V: the same for the reference and every candidate."""
        return self.shards if self.shards is not None else max(self.workers)

    def shard_counts(self, of_task: int | None) -> tuple[int, ...]:
        """Return the numbers of shards to verify with: what was asked for, or one per worker and more than that.

        One shard per worker hides whatever goes wrong between two shards of one worker.
        """
        if self.shards is not None or self.more.get("sync_batchnorm"):
            return (self.total_shards,)
        most = max(self.workers)
        return most, of_task if of_task is not None and of_task > most else 2 * most

    @property
    def worker_threads(self) -> int:
        """Threads of each worker: the same for all, because the bits of a sum depend on them."""
        return self.threads or max(1, env.cores() // self.total_shards)

    def options(self, candidate: Candidate) -> RunOptions:
        """Return the options of a candidate's run."""
        chosen = strategies.choice(candidate.strategy)
        idle = {"servers"} if not chosen.servers else set()
        idle |= {"exact"} if candidate.strategy == REFERENCE.strategy else set()
        tuned = {} if candidate == REFERENCE else self.tuning
        sizes = dict(chosen.sizes)
        return RunOptions(
            strategy=candidate.strategy,
            workers=candidate.workers,
            shards=self.total_shards,
            seed=self.spec.overrides.get("seed", RunOptions.seed),
            tuning=Tuning(**{name: one for name, one in tuned.items() if serves(name, chosen.name, sizes)}),
            **{name: value for name, value in self.more.items() if name not in idle},
        )

    def arithmetic(self, candidate: Candidate, precision: str) -> str:
        """Return the precision that a candidate's differences are held to: that of what it sends, if that is lower."""
        tuned = self.options(candidate).tuning
        lower = (f"{SENT}{one}" for one in (tuned.fsdp_dtype, tuned.compress) if one in ("bf16", "fp16"))
        return next(lower, precision) if precision == "fp32" else precision

    def candidates(self) -> tuple[list[Candidate], list[tuple[Candidate, str]]]:
        """Return the pairs that can be run, and those that cannot with the reason."""
        able: list[Candidate] = []
        unable: list[tuple[Candidate, str]] = []
        for strategy in self.strategies:
            for workers in self.workers:
                candidate = Candidate(strategy, workers)
                reason = self._hindrance(candidate)
                if reason:
                    unable.append((candidate, reason))
                else:
                    able.append(candidate)
        if not able:
            raise InputError(f"nothing can be verified: {unable[0][0]}: {unable[0][1]}.")
        return able, unable

    def _hindrance(self, candidate: Candidate) -> str:
        known = strategies.entry(candidate.strategy)
        if known.processes is None:
            try:
                mesh = strategies.choice(candidate.strategy).mesh(candidate.workers)
            except InputError as error:
                return str(error).partition(". Use")[0]
            if mesh.size(*DATA) > self.total_shards:
                return f"{mesh.size(*DATA)} workers cannot share {self.total_shards} shards"
        elif candidate.workers > self.total_shards:
            return f"{candidate.workers} workers cannot share {self.total_shards} shards"
        if known.processes == 1 and not known.threaded and candidate.workers > 1:
            return f"{candidate.strategy} is one process"
        return ""


REFERENCE = Candidate("single", 1)

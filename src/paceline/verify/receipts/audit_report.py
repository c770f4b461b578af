"""What an audit found, for a program and for a person. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.verify.report import Part, Report

_SHOWN = 20
_CHANGES_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class AuditReport(Report):
    """The whole finding, up to the last checkpoint of a run."""

    name: str
    steps: int
    epochs: int
    """Whole ones."""
    steps_of_next_epoch: int
    shards: int
    samples: int
    """Uses of a sample that are as they must be."""
    lost: int
    repeated: int
    served_twice: int
    """Pairs of step and shard that are recorded more than once."""
    served_wrongly: int
    """Records with other samples than the order gives."""
    by_rank: dict[int, int]
    """Samples that each rank served; a process that had several ranks is counted under its first."""
    workers: list[tuple[int, int, str]]
    """From which step on, how many workers, with which strategy."""
    superseded: int
    """Records of steps that were taken again: by a resumed run, or by a new group of workers."""
    beyond: int
    """Steps after the last checkpoint, which no kept weights have seen."""
    stream: bool
    finished: bool
    kept: list[int]
    """Steps whose checkpoints were there, and whose weights were hashed again."""
    problems: list[str]

    @property
    def holds(self) -> bool:
        """Whether every sample was used exactly once an epoch."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        names = ("step", "workers", "strategy")
        return {
            **super().as_json(),
            "workers": [dict(zip(names, one, strict=True)) for one in self.workers],
        }

    def parts(self) -> Iterator[Part]:
        """Return what was served by whom, and what is wrong with it."""
        epochs = f"{self.epochs} whole epoch{'' if self.epochs == 1 else 's'}"
        more = f" and {self.steps_of_next_epoch} steps of the next" if self.steps_of_next_epoch else ""
        yield f"{self.name}: {self.steps:,} steps ({epochs}{more}), {self.shards} shards, {self.samples:,} samples"
        yield f"workers: {self._workers()}"
        yield "served: " + ", ".join(f"rank {rank} {count:,}" for rank, count in self.by_rank.items())
        yield f"lost {self.lost:,}, repeated {self.repeated:,}"
        if self.superseded:
            yield f"{self.superseded:,} records left out: their steps were taken again, or they belong to none"
        if self.beyond:
            yield f"{self.beyond:,} steps after the last checkpoint left out: no kept weights have seen them"
        if self.kept:
            yield f"weights hashed again: step {', '.join(map(str, self.kept))}"
        yield from (f"  {problem}" for problem in self.problems[:_SHOWN])
        if len(self.problems) > _SHOWN:
            yield f"  and {len(self.problems) - _SHOWN:,} more (--json lists all)"
        if self.stream:
            yield (
                "a stream, or an order of the run's own: checked is that each position was served once and in order; what it "
                "gave there, and whether it ended where it should, no ledger can tell"
            )

    def _workers(self) -> str:
        told = [f"{workers} ({name}) from step {step}" for step, workers, name in self.workers]
        if len(told) > _CHANGES_SHOWN:
            left = len(told) - _CHANGES_SHOWN
            told[_CHANGES_SHOWN - 1 : -1] = [f"{left:,} more changes (--json lists all)"]
        return ", then ".join(told)

    @property
    def verdict(self) -> str:
        """Whether every sample was used exactly once an epoch."""
        if not self.holds and not (self.lost or self.repeated or self.served_twice or self.served_wrongly):
            return f"the records do NOT hold ({len(self.problems):,} faults)"
        if not self.holds:
            return f"NOT every sample was used exactly once an epoch ({len(self.problems):,} faults)"
        if self.stream:
            return "every position of the stream was used exactly once an epoch"
        return "every sample was used exactly once an epoch"

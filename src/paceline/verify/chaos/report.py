"""What a chaos run found, for a program and for a person. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.observe.formats import duration, plural
from paceline.verify.chaos.faults import KINDS, Fault, Mark
from paceline.verify.report import Part, Report, columns

SHARES = {"p50": 0.5, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True, kw_only=True)
class Injection:
    """What became of one fault of the plan."""

    fault: Fault
    mark: Mark | None
    """None where its point never came."""
    seconds: float | None
    """From the fault to the next finished step; None where there was none."""


@dataclass(frozen=True, kw_only=True)
class ChaosReport(Report):
    """The whole finding."""

    task: str
    strategy: str
    workers: int
    shards: int
    steps: int
    seed: int
    injections: tuple[Injection, ...]
    undisturbed_sha256: str
    weights_sha256: str | None
    """Of the disturbed run; None where it did not come to its end."""
    failure: str = ""
    steps_redone: int = 0
    samples: int = 0
    lost: int = 0
    repeated: int = 0
    problems: tuple[str, ...] = ()
    """What the events and the ledgers of the disturbed run tell against it."""
    restarts: int = 0
    """Workers started in place of lost ones."""
    out: str = ""
    seconds: float | None = 0.0
    assert_same: bool = False

    @property
    def same(self) -> bool:
        """Whether the disturbed run ended with the undisturbed one's bits."""
        return self.weights_sha256 == self.undisturbed_sha256

    @property
    def injected(self) -> list[Injection]:
        """The faults that went off."""
        return [one for one in self.injections if one.mark is not None]

    @property
    def holds(self) -> bool:
        """Whether all is well: every fault went off and was recovered from, and no sample was lost or repeated."""
        return (
            not self.failure
            and all(one.seconds is not None for one in self.injections)
            and not self.lost
            and not self.repeated
            and not self.problems
            and (self.same or not self.assert_same)
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        told = super().as_json()
        plan = [
            {**one["fault"], "mark": one["mark"], "recovery_s": _short(one["seconds"])}
            for one in told.pop("injections")
        ]
        kinds = {kind: count(of_kind) for kind, of_kind in self._by_kind().items()}
        return {**told, **count(self.injections), "kinds": kinds, "same": self.same, "plan": plan}

    def parts(self) -> Iterator[Part]:
        """Return a table by kind, then what happened to steps, samples and weights."""
        head = (
            f": {self.strategy} on {plural(self.workers, 'worker')}, {plural(self.shards, 'shard')}, "
            f"{plural(self.steps, 'step')}, seed {self.seed}"
        )
        yield Text.assemble((self.task, "bold"), head)
        yield self._table()
        missed = [f"not injected: {one.fault}" for one in self.injections if one.mark is None]
        missed += [f"not recovered: {one.fault}" for one in self.injected if one.seconds is None]
        missed += [f"the disturbed run failed: {self.failure}"] if self.failure else []
        yield from (Text(line, style="red") for line in missed)
        if self.failure:
            return
        yield (
            f"{plural(self.steps_redone, 'step')} redone, {plural(self.restarts, 'worker')} replaced; of "
            f"{plural(self.samples, 'sample')} {self.lost:,} lost, {self.repeated:,} repeated"
        )
        yield from (Text(f"  {problem}", style="red") for problem in self.problems[:10])
        yield Text(self._weights(), style="" if self.same else "red")

    @property
    def verdict(self) -> str:
        """Whether all is well."""
        return "all is well" if self.holds else "NOT all is well"

    def _weights(self) -> str:
        mine, theirs = (self.weights_sha256 or "")[:12], self.undisturbed_sha256[:12]
        if self.same:
            return f"the weights are those of the undisturbed run ({mine})"
        return f"the weights are NOT those of the undisturbed run ({mine}, not {theirs})"

    def _by_kind(self) -> dict[str, list[Injection]]:
        found = {kind: [one for one in self.injections if one.fault.kind == kind] for kind in KINDS}
        return {kind: of_kind for kind, of_kind in found.items() if of_kind}

    def _table(self) -> Table:
        table = columns(("fault", "planned", "injected", "recovered", *SHARES), left=("fault",))
        for kind, of_kind in self._by_kind().items():
            table.add_row(kind, *_cells(of_kind))
        table.add_row("all", *_cells(self.injections))
        return table


def count(injections: Sequence[Injection]) -> dict[str, Any]:
    """Count some faults."""
    return {
        "faults": len(injections),
        "injected": sum(one.mark is not None for one in injections),
        "recovered": sum(one.seconds is not None for one in injections),
        "recovery_s": quantiles(injections),
    }


def quantiles(injections: Sequence[Injection]) -> dict[str, float] | None:
    """Return p50, p95 and the most of the times to recover: each one that was seen, none made up between two."""
    seen = sorted(one.seconds for one in injections if one.seconds is not None)
    if not seen:
        return None
    return {name: round(seen[math.ceil(share * len(seen)) - 1], 4) for name, share in SHARES.items()}


def _cells(injections: Sequence[Injection]) -> list[str]:
    told = count(injections)
    times = told["recovery_s"] or {}
    return [
        *(str(told[name]) for name in ("faults", "injected", "recovered")),
        *(duration(times[name]) if name in times else "" for name in SHARES),
    ]


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)

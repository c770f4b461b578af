"""Whether a re-run met the hashes of a receipt, for a program and for a person. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.records.receipt import Point, RunSegment
from paceline.verify.report import Part, Report

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One recorded step: what the receipt says, and what came out here."""

    step: int
    there: Point
    here: Point

    @property
    def weights(self) -> bool:
        """Whether the weights are the same bits."""
        return self.there.weights_sha256 == self.here.weights_sha256

    @property
    def samples(self) -> bool | None:
        """Whether the same samples were served up to here; None where the receipt could not follow them."""
        if self.there.chain is None or self.here.chain is None:
            return None
        return self.there.chain == self.here.chain

    @property
    def holds(self) -> bool:
        """Whether nothing disagrees."""
        return self.weights and self.samples is not False

    def line(self) -> str:
        """Return it as text for a person."""
        there, here = self.there.weights_sha256[:_SHOWN], self.here.weights_sha256[:_SHOWN]
        weights = (
            f"weights agree ({there})" if self.weights else f"weights DIFFER ({there} there, {here} here)"
        )
        samples = {True: "samples agree", False: "samples DIFFER", None: "samples not on record"}[
            self.samples
        ]
        return f"step {self.step}: {weights}, {samples}"


@dataclass(frozen=True, kw_only=True)
class ReceiptReport(Report):
    """The whole comparison."""

    name: str
    folder: str
    first: int
    """The step the re-run began at."""
    strategy: str
    workers: int
    recorded: RunSegment
    compared: list[Compared]
    differences: list[str]
    """What the bits depend on and is not the same here."""
    faults: list[str]
    """Checkpoints in the folder, or facts of the task's data, that are not those that the receipt tells of."""
    seconds: float | None

    @property
    def holds(self) -> bool:
        """Whether the bits agree at every recorded step of the segment, and every checkpoint is the one on record."""
        return all(one.holds for one in self.compared) and not self.faults

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        told = super().as_json()
        return {
            **told,
            "last": self.compared[-1].step,
            "recorded": {name: told["recorded"][name] for name in ("strategy", "workers", "exactness")},
            "compared": [
                {**plain, "weights": one.weights, "samples": one.samples}
                for plain, one in zip(told["compared"], self.compared, strict=True)
            ],
        }

    def parts(self) -> Iterator[Part]:
        """Return each recorded step, and what may explain a difference."""
        recorded = self.recorded
        yield f"{self.name}: steps {self.first} to {self.compared[-1].step} of {self.folder} once more"
        yield f"by {self.strategy} x {self.workers}; recorded: {recorded.strategy} x {recorded.workers}"
        yield from (one.line() for one in self.compared)
        yield from self.faults
        if self.differences:
            yield "not the same here:"
            yield from (f"  {line}" for line in self.differences)
        if not all(one.holds for one in self.compared):
            yield from self._explained()

    @property
    def verdict(self) -> str:
        """Whether the bits are the same."""
        return "the same bits" if self.holds else "NOT the same bits"

    def _explained(self) -> list[str]:
        recorded = self.recorded
        if recorded.exactness != "bitwise":
            return [
                f"the run promised {recorded.exactness}, not bitwise: its bits may depend on the number of workers",
                f"compare with --strategy {recorded.strategy} --workers {recorded.workers}",
            ]
        if self.differences:
            return []
        return [
            "nothing that the receipt records is different here, so something else decides the bits:",
            "data files, code that the task imports, or the task itself",
            f"find out with: paceline verify {recorded.task}",
        ]

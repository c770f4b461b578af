"""The best checkpoints of a run: what each was scored, and which of them are kept apart from the newest. Imports no torch.

A best checkpoint is one like any other, `step-N`, whose manifest holds its score: both are committed by one rename.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline import documents
from paceline.checkpoint.manifest import Manifest, committed
from paceline.errors import CheckpointError, InputError
from paceline.scores import MAX, MODES, counts, is_better

KEY = "best"
"""Where a manifest's meta holds it."""
_UNSAID = 'Say which is better: mode="max" (an accuracy) or mode="min" (a loss).'


@dataclass(frozen=True, slots=True)
class Score:
    """How well a run did where it was saved."""

    value: float
    mode: str
    """`max` where more is better, `min` where less is."""
    metric: str = ""
    """What was measured, where that has a name."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"mode={documents.shown(self.mode)} is not one. {_UNSAID}")

    @classmethod
    def given(cls, value: Any, mode: str | None, metric: str = "") -> Score:
        """Make one of a number, or of a tensor with one, as a loop gives it."""
        if mode is None:
            raise InputError(f"best={value} does not say what is best. {_UNSAID}")
        try:
            return cls(float(value), mode, metric)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            if mode not in MODES:
                raise
            raise InputError(f"best={value!r:.80} is no number. Give the value of one metric.") from None

    @property
    def counts(self) -> bool:
        """Whether it can be compared: what is infinite or no number is never the best."""
        return counts(self.value)

    @property
    def kind(self) -> tuple[str, str]:
        """What it can be compared with."""
        return self.mode, self.metric

    def beats(self, other: Score) -> bool:
        """Return whether it is better; of two that are equal neither is."""
        return is_better(self.value, other.value, self.mode)

    def __str__(self) -> str:
        """Return it for people."""
        return f"{self.metric or 'score'} {self.value:.6g} ({self.mode})"


class Scored(NamedTuple):
    """A checkpoint and its score."""

    step: int
    path: Path
    score: Score


def score_of(manifest: Manifest) -> Score | None:
    """Return how well a checkpoint did, where its run said so."""
    told: Mapping[str, Any] | None = manifest.meta.get(KEY)
    return None if told is None else Score(told["value"], told["mode"], told["metric"])


class Scores:
    """The scores of the checkpoints in one folder; a manifest is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, int, int], Score | None] = {}

    def all(self) -> list[Scored]:
        """Return all that have one, the oldest first; of two copies of a step the one that readers prefer."""
        found: dict[int, Scored] = {}
        for path in committed(self._folder):
            try:
                score = self._score(path)
            except (CheckpointError, OSError):
                continue  # a damaged one, or one that has just been deleted
            if score is not None:
                step = int(path.name.removeprefix("step-"))
                found[step] = Scored(step, path, score)
        return list(found.values())

    def _score(self, path: Path) -> Score | None:
        at = path.stat()
        key = path.name, at.st_ino, at.st_ctime_ns
        if key not in self._known:
            self._known[key] = score_of(Manifest.read(path))
        return self._known[key]

    def best(self, keep: int, whole: Callable[[Path], bool] = lambda _: True) -> list[Scored]:
        """Return the `keep` best ones, the best first; of equal ones the earlier."""
        return ranked(one for one in self.all() if whole(one.path))[:keep]

    def admits(self, step: int, score: Score, keep: int) -> bool:
        """Return whether a score of this step is among the `keep` best up to there: a step that is repeated decides as before."""
        before = [one for one in self.all() if one.step < step]
        other = next((one for one in before if one.score.kind != score.kind), None)
        if other is not None:
            raise InputError(
                f"the best checkpoints of this run are those of {other.score} (step {other.step}), and {score} cannot be "
                "compared with that. Give one metric and one mode."
            )
        return score.counts and sum(not score.beats(one.score) for one in before) < keep


def ranked(scored: Iterable[Scored]) -> list[Scored]:
    """Return them by their scores, the best first; of equal ones the earlier."""
    return sorted(
        scored, key=lambda one: (-one.score.value if one.score.mode == MAX else one.score.value, one.step)
    )


def best_of(place: Path) -> list[Scored]:
    """Return the best checkpoints of a run, the best first; none where it has none."""
    folder = place / "checkpoints"
    return ranked(Scores(folder if folder.is_dir() else place).all())


def best_path(place: Path) -> Path:
    """Return the folder of a run's best checkpoint; raise where it has none."""
    found = best_of(place)
    if not found:
        raise CheckpointError(
            f"{place} has no best checkpoint: nothing was saved there with run.save(best=..., mode=...). "
            "Leave --best out for the newest one."
        )
    return found[0].path

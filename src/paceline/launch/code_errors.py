"""The errors of the user's own code in a run: each is retried once, a second one in the same step ends the run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.launch.failures import WorkerFailure


@dataclass(frozen=True, kw_only=True)
class CodeError:
    """One exception, or an exit in mid-run, that the run may have come through; the closing JSON has all of them."""

    rank: int
    step: int | None
    message: str
    retried: bool


class CodeErrors:
    """All errors of a run, and the places that wait for a replacement because of one."""

    def __init__(self) -> None:
        self.all: list[CodeError] = []
        self.vacant: list[int] = []
        """The ranks whose workers failed and are to be replaced before anybody goes on."""
        self._first: dict[tuple[int, bool], WorkerFailure] = {}
        """The failure that was retried, by step, and apart from it the evaluation that comes before the step."""
        self.latest: WorkerFailure | None = None
        """The failure that was noted last."""
        self._unplaced: list[int] = []
        """Which of all errors happened in a step that is not known yet."""

    def before(self, step: int | None, *, evaluating: bool = False) -> WorkerFailure | None:
        """Return the failure that the same step was retried for, if it was."""
        return None if step is None else self._first.get((step, evaluating))

    def note(
        self, failure: WorkerFailure, step: int | None, *, retried: bool, evaluating: bool = False
    ) -> None:
        """Enter a failure."""
        self.latest = failure
        if step is None:
            self._unplaced.append(len(self.all))
        else:
            self._first.setdefault((step, evaluating), failure)
        self.all.append(CodeError(rank=failure.rank, step=step, message=failure.message, retried=retried))

    def place(self, step: int, *, evaluating: bool = False) -> WorkerFailure | None:
        """Count those whose step was unknown for this one; returns the failure that it was retried for before, if it was."""
        before = self.before(step, evaluating=evaluating)
        for index in self._unplaced:
            self.all[index] = replace(self.all[index], step=step)
        if self._unplaced and self.latest is not None:
            self._first.setdefault((step, evaluating), self.latest)
        several = len(self._unplaced) > 1
        placed, self._unplaced = bool(self._unplaced), []
        return (before or (self.latest if several else None)) if placed else None

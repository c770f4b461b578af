"""What `paceline.train` returns: the numbers of a run, and the way to its weights. Imports no torch before those are read."""

from __future__ import annotations

import html
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.in_python.history import History, read_history
from paceline.observe import formats
from paceline.training import folder
from paceline.training.options import RunOptions

if TYPE_CHECKING:
    from torch import nn

_left: list[TemporaryFolder] = []
"""Those of runs that ended early, for as long as this process lives: one can go on with them."""


_ATTEMPTS, _BETWEEN_S = 20, 0.05


def _remove(folder: Path) -> None:
    """Remove a folder, also where something of the run that has just ended still writes its last words into it."""
    for _ in range(_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_BETWEEN_S)


class TemporaryFolder:
    """The run folder of a run that was given none: it goes with its `Result`, at the latest when the process ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="paceline-"))  # 0700
        self.remove = weakref.finalize(self, _remove, self.path)

    def keep(self) -> None:
        """Keep it as long as this process."""
        _left.append(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """How a run ended. The same on every number of workers, but for times and what happened to workers."""

    task: str
    strategy: str
    workers: int
    shards: int
    exactness: str
    """bitwise, numeric or statistical."""
    steps: int
    """Optimizer steps from the beginning of the run."""
    samples: int
    loss: float | None
    """Of the last step, the mean over the global batch."""
    metrics: Mapping[str, float]
    """Of the last evaluation."""
    weights_sha256: str
    recoveries: tuple[Mapping[str, Any], ...]
    """Each time that the workers formed a new group: why, and in how many seconds."""
    restarts: int
    """Workers that were started in place of lost ones."""
    wall_s: float
    out: Path
    """The run folder. Where none was given it is a temporary one, which goes with this object."""
    json: Mapping[str, Any] = field(default_factory=dict)
    """All that `paceline train --json` prints."""
    led_by: str | None = None
    """The machine that has the result, where this one lent its workers to it: then the numbers are none."""
    _made_by: tuple[Any, Mapping[str, Any] | None] = (None, None)
    _folder: TemporaryFolder | None = None
    _events_end: int | None = None

    @classmethod
    def of(
        cls,
        found: Mapping[str, Any],
        options: RunOptions,
        name: str,
        *,
        made_by: tuple[Any, Mapping[str, Any] | None],
        temporary: TemporaryFolder | None = None,
        led_by: str | None = None,
    ) -> Result:
        """Return the result of what rank 0 returned; `made_by` is the task as it was given, with its settings."""
        out = options.out or Path()
        events = out / folder.EVENTS
        return cls(
            task=name,
            strategy=found.get("strategy", options.strategy),
            workers=found.get("workers", options.workers),
            shards=found.get("shards", options.total_shards),
            exactness=found.get("exactness", ""),
            steps=found.get("steps", 0),
            samples=found.get("samples", 0),
            loss=found.get("loss"),
            metrics=found.get("metrics", {}),
            weights_sha256=found.get("weights_sha256", ""),
            recoveries=tuple(found.get("recoveries", ())),
            restarts=found.get("restarts", 0),
            wall_s=found.get("wall_s", 0.0),
            out=out,
            json=found,
            led_by=led_by,
            _made_by=made_by,
            _folder=temporary,
            _events_end=events.stat().st_size if events.exists() else None,
        )

    @cached_property
    def history(self) -> History:
        """The loss of each step, and what was measured after which; read when it is first asked for."""
        return read_history(self.out, self.steps, self._events_end)

    def model(self, *, average: bool | None = None) -> nn.Module:
        """Return the trained model, on the CPU and in eval mode; made anew with each call. `average` is as in `paceline.load`."""
        from paceline.in_python.loading import load

        task, settings = self._made_by
        return load(self.out, step=self.steps or None, task=task, settings=settings, average=average)

    def __repr__(self) -> str:
        """Return the numbers, one line each."""
        return "\n".join(f"{name:<12} {text}" for name, text in self._rows())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self._rows()
        )
        return f"<table>{rows}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        if self.led_by is not None:
            return [("task", self.task), ("result", f"{self.led_by} has it: it led the run")]
        workers = formats.plural(self.workers, "worker")
        rows = [
            ("task", self.task),
            (
                "trained",
                f"{self.strategy} on {workers}, {formats.plural(self.shards, 'shard')}, {self.exactness}",
            ),
            ("work", f"{formats.plural(self.steps, 'step')}, {formats.plural(self.samples, 'sample')}"),
        ]
        if self.loss is not None:
            rows.append(("train loss", formats.number(self.loss)))
        rows += [
            (f"eval {name.replace('_', ' ')}", formats.metric(name, value))
            for name, value in self.metrics.items()
        ]
        if self.recoveries or self.restarts:
            times = formats.plural(len(self.recoveries), "recovery", "recoveries")
            rows.append(("failures", f"{times}, {formats.plural(self.restarts, 'restart')}"))
        rows += [
            ("weights", f"sha256 {self.weights_sha256[:16]}…"),
            ("time", formats.duration(self.wall_s)),
        ]
        kept = "" if self._folder is None else " (temporary: goes with this result)"
        return [*rows, ("out", f"{self.out}{kept}")]

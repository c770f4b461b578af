"""Events as a run of Weights & Biases; its own variables (WANDB_MODE, WANDB_PROJECT, ...) say where it goes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.observe.events import Event, RunFailed, RunFinished, RunStarted
from paceline.observe.scalars import scalars
from paceline.observe.sink_catalogue import continued

PROJECT = "paceline"


class WandbSink:
    """Logs every number over its own axis, `step`: wandb's must not go back, and a run that lost workers may."""

    def __init__(self, folder: Path | None) -> None:
        import wandb

        known = None if folder is None else continued(folder, "wandb")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=None if wandb.Settings().project else PROJECT,
            name=None if folder is None else folder.name,
            dir=None if folder is None else str(folder),
            id=known,
            resume=None if known is None else "allow",
        )
        if folder is not None:
            continued(folder, "wandb", self._run.id)
        self._run.define_metric("*", step_metric="step")
        self._status = 0

    def emit(self, event: Event) -> None:
        """Take one event."""
        match event:
            case RunStarted():
                self._run.config.update(asdict(event), allow_val_change=True)
            case RunFinished(result=result):
                self._run.summary.update({f"result/{name}": value for name, value in result.items()})
            case RunFailed():
                self._status = 1
            case _:
                found = scalars(event)
                if found is not None:
                    self._run.log({"step": found.step, **found.values})

    def close(self) -> None:
        """Send, or write, what is left."""
        self._run.finish(exit_code=self._status)

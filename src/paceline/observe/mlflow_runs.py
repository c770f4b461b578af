"""Events as a run of MLflow, at MLFLOW_TRACKING_URI, or in `mlruns` of the run folder."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.observe.events import Event, Logged, RunFailed, RunStarted, StepFinished
from paceline.observe.scalars import scalars
from paceline.observe.sink_catalogue import continued
from paceline.world import env

MOST = 500
"""How many numbers go in one request, which may have a thousand."""


class MlflowSink:
    """Logs through MLflow's client, in batches; the experiment is MLFLOW_EXPERIMENT_NAME, or paceline."""

    def __init__(self, folder: Path | None, *, every: float = 1.0) -> None:
        local = folder is not None and env.read("MLFLOW_TRACKING_URI") is None
        if local:  # a folder is asked for, which MLflow 3 takes only where that is said
            env.export({"MLFLOW_ALLOW_FILE_STORE": env.read("MLFLOW_ALLOW_FILE_STORE") or "true"})
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        where = (folder / "mlruns").resolve().as_uri() if folder is not None and local else None
        self._client: Any = MlflowClient(tracking_uri=where)
        self._run: str = (None if folder is None else continued(folder, "mlflow")) or self._created(folder)
        self._every, self._sent = every, time.monotonic()
        self._waiting: list[Any] = []
        self._status = "FINISHED"

    def _created(self, folder: Path | None) -> str:
        name = env.read("MLFLOW_EXPERIMENT_NAME") or "paceline"
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        made = self._client.create_run(experiment, run_name=None if folder is None else folder.name)
        found = str(made.info.run_id)
        return found if folder is None else continued(folder, "mlflow", found) or found

    def emit(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, RunStarted):
            for name, value in asdict(event).items():
                self._client.set_tag(self._run, f"paceline.{name}", str(value))
        if isinstance(event, RunFailed):
            self._status = "FAILED"
        found = scalars(event)
        if found is not None:
            moment = int(found.time * 1000)
            self._waiting += [
                self._metric(name, value, moment, found.step) for name, value in found.values.items()
            ]
        late = time.monotonic() - self._sent >= self._every
        if late or len(self._waiting) >= MOST or not isinstance(event, StepFinished | Logged):
            self._send()

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._send()
        self._client.set_terminated(self._run, status=self._status)

    def _send(self) -> None:
        self._sent = time.monotonic()
        while self._waiting:
            part, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            self._client.log_batch(self._run, metrics=part)

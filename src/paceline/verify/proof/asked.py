"""What is to be verified, by the options that were said: on the command line or as keywords. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.launch.resumed import said_for
from paceline.option_fields import NOT_COMPARED, known_options, marked
from paceline.strategies.tuning import Tuning
from paceline.training.by_value import Payload
from paceline.training.launcher_values import LauncherValues
from paceline.training.options import RunOptions
from paceline.training.spec import OVERRIDES, TrainSpec
from paceline.verify.proof.request import VerifyRequest

STEPS = 20
"""How many steps are compared, unless it is told otherwise."""
WITHOUT_EFFECT = (*marked(RunOptions, NOT_COMPARED), *marked(TrainSpec, NOT_COMPARED))
"""Options of a training that a comparison has no use for."""


def request_of(
    said: Mapping[str, Any],
    *,
    task: str,
    name: str,
    shipped: Payload | None = None,
    launcher: LauncherValues | None = None,
    **own: Any,
) -> VerifyRequest:
    """Return what is to be verified of a task: the options of a run that were `said`, beside those of verify's `own`."""
    left = (*WITHOUT_EFFECT, *OVERRIDES, "strategy", "workers", "resume")
    of_run = {one: said[one] for one in known_options(RunOptions) if one in said and one not in left}
    tuning = {one: said[one] for one in known_options(Tuning) if one in said}
    return VerifyRequest(
        spec=TrainSpec(
            task=task,
            name=name,
            settings=said["settings"],
            steps=said.get("steps", STEPS),
            overrides={one: said[one] for one in OVERRIDES if one in said},
            shipped=shipped,
            launcher=launcher or LauncherValues(),
            **{one: said[one] for one in ("horizon", "batch_size", "max_grad_norm") if one in said},
        ),
        epochs=said.get("epochs"),
        tuning=said_for(own["strategies"], tuning),
        shards=of_run.pop("shards", None),
        more=of_run,
        **own,
    )

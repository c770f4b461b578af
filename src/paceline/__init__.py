"""Distributed PyTorch training whose answer does not depend on how many workers computed it."""

from typing import TYPE_CHECKING

from paceline import lazy
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.declared import (
        Average,
        Best,
        CheckpointInfo,
        Collected,
        EarlyStopping,
        EpochInfo,
        EvalInfo,
        StepInfo,
    )
    from paceline.errors import InputError, PacelineError, WorkerFailedError
    from paceline.in_python.loading import load
    from paceline.in_python.result import Result
    from paceline.in_python.training import resume, train
    from paceline.in_python.verifying import verify
    from paceline.launch.api import launch
    from paceline.launch.roles import launch_roles
    from paceline.strategies.epoch_schedules import OnMetric, PerEpoch
    from paceline.task import Loss, Mean, Task
    from paceline.training.run import Run
    from paceline.training.step import Step
    from paceline.world.base import Comm
    from paceline.world.world import World

__all__ = [
    "Average",
    "Best",
    "CheckpointInfo",
    "Collected",
    "Comm",
    "EarlyStopping",
    "EpochInfo",
    "EvalInfo",
    "InputError",
    "Loss",
    "Mean",
    "OnMetric",
    "PacelineError",
    "PerEpoch",
    "Result",
    "Run",
    "Step",
    "StepInfo",
    "Task",
    "WorkerFailedError",
    "World",
    "__version__",
    "launch",
    "launch_roles",
    "load",
    "resume",
    "train",
    "verify",
]

# `launch` and `verify` are packages and functions at once: the modules can be called.
__getattr__, _ = lazy.names(
    __name__,
    {
        "Average": "paceline.declared",
        "Best": "paceline.declared",
        "CheckpointInfo": "paceline.declared",
        "Collected": "paceline.declared",
        "Comm": "paceline.world.base",
        "EarlyStopping": "paceline.declared",
        "EpochInfo": "paceline.declared",
        "EvalInfo": "paceline.declared",
        "InputError": "paceline.errors",
        "Loss": "paceline.task",
        "Mean": "paceline.task",
        "OnMetric": "paceline.strategies.epoch_schedules",
        "PacelineError": "paceline.errors",
        "PerEpoch": "paceline.strategies.epoch_schedules",
        "Result": "paceline.in_python.result",
        "Run": "paceline.training.run",
        "Step": "paceline.training.step",
        "StepInfo": "paceline.declared",
        "Task": "paceline.task",
        "WorkerFailedError": "paceline.errors",
        "World": "paceline.world.world",
        "launch_roles": "paceline.launch.roles",
        "load": "paceline.in_python.loading",
        "resume": "paceline.in_python.training",
        "train": "paceline.in_python.training",
    },
)


def __dir__() -> list[str]:
    return __all__

"""Distributed PyTorch training whose answer does not depend on how many workers computed it."""

from typing import TYPE_CHECKING

from paceline import lazy
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.errors import InputError, PacelineError
    from paceline.launch.api import launch
    from paceline.launch.roles import launch_roles
    from paceline.task import Loss, Mean, Task
    from paceline.training.run import Run
    from paceline.training.step import Step
    from paceline.world.base import Comm
    from paceline.world.world import World

__all__ = [
    "Comm",
    "InputError",
    "Loss",
    "Mean",
    "PacelineError",
    "Run",
    "Step",
    "Task",
    "World",
    "__version__",
    "launch",
    "launch_roles",
]

# `launch` is a package and a function at once: the module `paceline.launch` can be called.
__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "Comm": "paceline.world.base",
        "InputError": "paceline.errors",
        "Loss": "paceline.task",
        "Mean": "paceline.task",
        "PacelineError": "paceline.errors",
        "Run": "paceline.training.run",
        "Step": "paceline.training.step",
        "Task": "paceline.task",
        "World": "paceline.world.world",
        "launch_roles": "paceline.launch.roles",
    },
)

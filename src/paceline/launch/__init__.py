"""How workers come to be. `paceline.launch(function, workers=4)` is the way in from Python.

Nothing here loads torch before a worker does.
"""

import inspect
import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A module that can be called: `paceline.launch` is this package, and calling it launches."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from paceline.launch.api import launch

        return launch(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        """What a call takes: read only where somebody asks."""
        from paceline.launch.api import launch

        return inspect.signature(launch)


sys.modules[__name__].__class__ = _CallableModule

"""A DataLoader that `run.prepare` was given, as the loop goes on with it: each pass is an epoch of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.data import ShardedLoader
from paceline.training.step import Step


@dataclass(frozen=True)
class PreparedLoader:
    """Yields one `Step` for each global batch of an epoch: `for step in loader` is `for step in run.steps(loader, epochs=1)`."""

    sharded: ShardedLoader
    source: Any
    """What it was made of: a DataLoader, or the loader itself."""
    _steps: Callable[..., Iterator[Step]]

    def __iter__(self) -> Iterator[Step]:
        """Go through the data once, in the order of the run's next epoch."""
        return self._steps(self.sharded, epochs=1)

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        steps = self.sharded.batches_per_epoch  # also where the run trains with each of them in turns
        if steps is None:
            raise TypeError("a stream does not say how many steps an epoch has")
        return steps

    @property
    def dataset(self) -> Any:
        """The data set of the DataLoader."""
        return getattr(self.source, "dataset", None)

    @property
    def batch_size(self) -> int:
        """The GLOBAL batch."""
        return self.sharded.batch_size

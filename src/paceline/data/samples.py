"""The samples of a map-style data set, one by one, with what each draws."""

from __future__ import annotations

from typing import Any

from paceline.data.generators import seed_generators
from paceline.world.seeds import derive


class Samples:
    """Fetches single samples as the data set wants them fetched."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self.come_together = callable(getattr(dataset, "__getitems__", None))
        """Whether the data set gives several samples at once."""

    def seed(self, epoch: int, place: int, name: str = "sample") -> None:
        """Have the generators begin where they do for a sample, or for a position of an order that may name it twice."""
        seed_generators(derive(self._seed, name, epoch, place))

    def one(self, sample: int) -> Any:
        """Read a sample."""
        return self._dataset.__getitems__([sample])[0] if self.come_together else self._dataset[sample]

"""What was seen of one worker of a script. Plain data, so that it travels. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.verify.proof.record import Digests

KEPT_STEPS = 20
"""Gradients and weights of so many steps are written down; what comes later is digested only."""


@dataclass
class Wrapped:
    """A model that was handed to DistributedDataParallel."""

    before: Digests
    """Its weights as this rank made them."""
    after: Digests = field(default_factory=dict)
    """Its weights once DDP had (or had not) made them agree."""
    dropout: list[str] = field(default_factory=list)
    batch_statistics: list[str] = field(default_factory=list)


@dataclass
class Pass:
    """One pass over a DataLoader."""

    loader: int
    """Which loader, in the order in which they were first used."""
    sampler: str
    samples: int
    """Of the data set."""
    shuffles: bool
    data: str
    """Digest of the data set's first item: ids of ranks whose data differs are not the same samples."""
    part: str = ""
    """Digest of the ids that a Subset of the data set is made of; empty where the loader has all of it."""
    served: int = 0
    """Samples of the loader's own data set."""
    replicas: int = 0
    """Among how many ranks a DistributedSampler deals them out, padding the last round; 0 for any other sampler."""
    batches: list[list[int]] = field(default_factory=list)
    steps: int = 0
    """Optimizer steps made while it was the latest pass: above 0, it is training data."""

    @property
    def indices(self) -> list[int]:
        """Every sample id, in order."""
        return [index for batch in self.batches for index in batch]


@dataclass
class StepTrace:
    """One call of an optimizer's step."""

    rates: tuple[float, ...]
    losses: list[float]
    """Scalars on which backward was called since the step before."""
    gradients: Digests
    rows: int = 0
    """How many rows the DDP module was called with since the step before."""
    clipped: list[Digests] = field(default_factory=list)
    """The gradients as each call of torch's clipping functions found them."""


@dataclass
class ScriptTrace:
    """Everything seen of one worker."""

    rank: int
    wrapped: list[Wrapped] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)
    bent_hooks: list[str] = field(default_factory=list)
    """Parameters with a gradient hook that is not linear: it runs before DDP reduces."""

    @property
    def training(self) -> list[Pass]:
        """The passes in which something was learned."""
        return [one for one in self.passes if one.steps]

"""The ways to train that every task of the zoo is tried on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One strategy on so many workers and shards."""

    label: str
    """The strategy as a user thinks of it; tasks declare who refuses them by this name."""
    workers: int
    shards: int
    strategy: str = ""
    """As `--strategy` takes it; the label where it is left out."""
    level: str = "bitwise"
    """The exactness that a run must declare."""
    options: Mapping[str, Any] = field(default_factory=dict)
    resumes: bool = False
    """Whether runs are also left halfway here and taken up by one process, and the other way round."""
    mesh: bool = False

    @property
    def name(self) -> str:
        """Return its name on the command line."""
        return f"{self.label}-{self.workers}w{self.shards}s"

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def asked(self) -> str:
        """Return what `--strategy` is given."""
        return self.strategy or self.label


SINGLE = "single"
PLAIN = Layout(label=SINGLE, workers=1, shards=1)
"""One process with one shard: compared with a loop from a textbook."""
MESHES = ("ddp=2,fsdp=2", "ddp=2,tp=2", "fsdp=2,pp=2")
_TWO = {"local_steps": 2}
LAYOUTS = (
    PLAIN,
    Layout(label="dp", workers=2, shards=2),
    Layout(label="dp", workers=2, shards=4, resumes=True),
    Layout(label="ddp", workers=2, shards=2),
    Layout(label="ddp", workers=2, shards=4, resumes=True),
    Layout(label="ddp", workers=3, shards=4),
    Layout(label="zero", strategy="ddp", workers=2, shards=2, options={"tuning": {"shard_optimizer": True}}),
    Layout(
        label="zero",
        strategy="ddp",
        workers=3,
        shards=4,
        options={"tuning": {"shard_optimizer": True}},
        resumes=True,
    ),
    Layout(label="fsdp", workers=2, shards=2),
    Layout(label="fsdp", workers=2, shards=4, resumes=True),
    Layout(label="fsdp", workers=3, shards=4),
    Layout(label="pp", workers=2, shards=2),
    Layout(label="pp", workers=2, shards=4, resumes=True),
    Layout(label="tp", workers=2, shards=2, level="numeric"),
    Layout(label="tp", workers=2, shards=4, level="numeric", resumes=True),
    Layout(label="ps", workers=2, shards=2),
    Layout(label="ps", workers=2, shards=4, options={"servers": 2}, resumes=True),
    Layout(label="hybrid", workers=2, shards=2),
    Layout(label="hybrid", workers=2, shards=4, resumes=True),
    Layout(label="local-sgd", workers=2, shards=2, level="statistical", options={"tuning": _TWO}),
    Layout(
        label="local-sgd", workers=2, shards=4, level="statistical", options={"tuning": _TWO}, resumes=True
    ),
    Layout(label="ddp=2,fsdp=2", workers=4, shards=4, mesh=True),
    Layout(label="ddp=2,tp=2", workers=4, shards=4, level="numeric", mesh=True),
    Layout(label="fsdp=2,pp=2", workers=4, shards=4, mesh=True),
)
LABELS = tuple(dict.fromkeys(layout.label for layout in LAYOUTS))


def reference(shards: int) -> Layout:
    """Return the layout whose answer is the right one for so many shards."""
    return Layout(label=SINGLE, workers=1, shards=shards)


def levels() -> dict[str, str]:
    """Return the exactness of each strategy."""
    return {layout.label: layout.level for layout in LAYOUTS}

"""The receipt of a run, `receipt.json`: what its bits depend on, and the hashes they came to. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from paceline.errors import InputError

FORMAT = 1
NAME = "receipt.json"
FIRST_LINK = bytes(32)
"""What the hash chain over the sample ids begins with."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run's processes: where the run stood, and everything that its bits depend on."""

    generation: int
    """Counts the starts; every record of the ledger carries it."""
    step: int
    """Steps taken before it, from the beginning of the run."""
    epoch: int
    step_of_epoch: int
    strategy: str
    workers: int
    processes: int
    exactness: str
    # The data.
    stream: bool
    samples: int | None
    """Of the training set; None for a stream that does not say."""
    shuffle: bool
    order_seed: int
    # The computation.
    precision: str
    compile: bool
    micro_batch: int | None
    loader_workers: int
    allow_unused: bool
    sync_batchnorm: bool
    lane: str
    clip: float | None
    horizon: int | None
    """How many steps the schedule is laid out for."""
    # The task; a loop of the user's own has no reference.
    task: str | None
    settings: Mapping[str, str]
    sources: Mapping[str, str]
    """sha256 of each file that a class of the task is written in."""
    # The machine.
    device: str
    device_name: str
    threads: int
    """Of each worker."""
    versions: Mapping[str, str]
    paceline_sha256: str
    """Over all of paceline's own source files."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A checkpoint: what the weights were, and the chain over all samples served up to there."""

    weights_sha256: str
    chain: str | None
    """None where not every worker's ledger could be read."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The whole document. On disk, what the last start says also stands at the top, for a reader's ease."""

    name: str
    seed: int
    shards: int
    batch_size: int
    history: tuple[Start, ...]
    checkpoints: Mapping[int, Point] = field(default_factory=dict)
    """By the number of steps taken; those that have been deleted since are kept here."""
    finished: bool = False

    @property
    def last(self) -> Start:
        """The latest start."""
        return self.history[-1]

    @property
    def steps(self) -> int:
        """Steps up to the last checkpoint: the ones whose weights are kept."""
        return max(self.checkpoints, default=0)

    @property
    def stretches(self) -> tuple[Start, ...]:
        """The starts that led to what there is now, each from its step to the next one's.

        A start that resumed from an earlier step than a former one did has taken that one's steps again.
        """
        led: list[Start] = []
        for start in reversed(self.history):
            if not led or start.step < led[-1].step:
                led.append(start)
        return tuple(reversed(led))

    def restarted(self, start: Start) -> Receipt:
        """Go on with a new start; what came after the checkpoint it resumed from has not led anywhere."""
        kept = {step: point for step, point in self.checkpoints.items() if step <= start.step}
        return replace(self, history=(*self.history, start), checkpoints=kept, finished=False)

    def saved(self, step: int, point: Point) -> Receipt:
        """Add a checkpoint."""
        return replace(self, checkpoints={**self.checkpoints, step: point})

    def write(self, folder: Path) -> None:
        """Put the document into a run folder in place of the one before, at once."""
        end = self.checkpoints.get(self.steps)
        document = {
            "format": FORMAT,
            "name": self.name,
            "seed": self.seed,
            "shards": self.shards,
            "batch_size": self.batch_size,
            **{key: value for key, value in asdict(self.last).items() if key not in _OF_ONE_START},
            "steps": self.steps,
            "finished": self.finished,
            "weights_sha256": None if end is None else end.weights_sha256,
            "chain": None if end is None else end.chain,
            "checkpoints": {str(step): asdict(point) for step, point in sorted(self.checkpoints.items())},
            "history": [asdict(start) for start in self.history],
        }
        partial = folder / f".{NAME}.partial-{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with partial.open("w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(folder / NAME)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise InputError(
                f"{folder / NAME} cannot be written: {error.strerror}. Make room, or choose another --out."
            ) from error

    @classmethod
    def read(cls, folder: Path) -> Receipt:
        """Read the receipt of a run folder."""
        path = folder / NAME
        try:
            document = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise InputError(f"there is no {NAME} in {folder}. Give the folder of a run (--out).") from None
        except (ValueError, OSError) as error:
            raise InputError(f"{path} cannot be read ({error}). {_REMEDY}") from error
        try:
            if document["format"] != FORMAT:
                raise InputError(
                    f"{path} has format {document['format']}, and this version of paceline reads {FORMAT}. "
                    "Use the version that wrote it."
                )
            if not document["history"]:
                raise ValueError("it tells of no start")
            return cls(
                name=document["name"],
                seed=document["seed"],
                shards=document["shards"],
                batch_size=document["batch_size"],
                history=tuple(Start(**start) for start in document["history"]),
                checkpoints={int(step): Point(**point) for step, point in document["checkpoints"].items()},
                finished=document["finished"],
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path} is not a receipt ({error!r}). {_REMEDY}") from error


_REMEDY = "Restore it from a copy, or remove it to go on without what it knew."
_OF_ONE_START = ("generation", "step", "epoch", "step_of_epoch")


def environment_differences(there: Start, here: Start) -> list[str]:
    """Say what the bits depend on and is not the same at two starts, one line each."""
    lines = [
        f"{what}: {before} there, {now} here"
        for what, before, now in (
            ("device", there.device, here.device),
            ("device name", there.device_name, here.device_name),
            ("threads of each worker", there.threads, here.threads),
            ("paceline's own source", there.paceline_sha256[:12], here.paceline_sha256[:12]),
            *(
                (name, there.versions.get(name), here.versions.get(name))
                for name in sorted({*there.versions, *here.versions})
            ),
        )
        if before != now
    ]
    # By content: the same task may lie in another folder by now.
    if sorted(there.sources.values()) != sorted(here.sources.values()):
        files = sorted({Path(name).name for name in (*there.sources, *here.sources)})
        lines.append(f"the task's source has changed: {', '.join(files)}")
    return lines

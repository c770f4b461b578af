"""The receipt of a run, `receipt.json`: what its bits depend on, and the hashes they came to. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline import documents, ranges
from paceline.errors import InputError, RecordsError

FORMAT = 2
READABLE = (1, 2)
"""Format 1 wrote out every start in full."""
NAME = "receipt.json"
FIRST_LINK = bytes(32)
"""What the hash chain over the sample ids begins with."""


@dataclass(frozen=True, kw_only=True)
class RunSegment:
    """One start of a run, or of a new group of its workers: where it stood, and everything that its bits depend on."""

    generation: int
    """Counts the starts; every record of the ledger carries it."""
    step: int
    """Steps taken before it, from the beginning of the run."""
    epoch: int
    step_of_epoch: int
    strategy: str
    workers: int
    processes: int
    mesh: str = ""
    """How the processes were laid out, where data was not dealt out to each."""
    shares: tuple[int, ...] | None = None
    """How many shards each process carries, where they are not dealt out evenly."""
    exactness: str
    # The data.
    stream: bool
    samples: int | None
    """Of the training set; None for a stream that does not say."""
    shuffle: bool
    repeats: int = 1
    """How many steps in a row were taken with each batch: the turns of several optimizers."""
    order_seed: int
    uneven: bool = False
    """Whether an order of the run's own makes the batches, and one in the middle of an epoch may be smaller than the others."""
    # The computation.
    precision: str
    compile: bool
    micro_batch: int | None
    num_workers: int
    find_unused_parameters: bool
    sync_batchnorm: bool
    transport_asked: str
    transport: str = ""
    """What tensors really travelled by; nothing in receipts of older versions."""
    tuning: Mapping[str, Any] = field(default_factory=dict)
    """What the strategy was tuned by, as far as it was."""
    max_grad_norm: float | None
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
    """The whole document. On disk, what the last start says also stands at the top, for a reader's ease, and of each
    start but the first only what it changed: workers may come and go hundreds of times.
    """

    name: str
    seed: int
    shards: int
    batch_size: int
    shards_from: str = ""
    """Who said how many shards: option, task or workers; nothing in receipts of older versions."""
    history: tuple[RunSegment, ...]
    checkpoints: Mapping[int, Point] = field(default_factory=dict)
    """By the number of steps taken; those that have been deleted since are kept here."""
    finished: bool = False

    @property
    def last(self) -> RunSegment:
        """The latest start."""
        return self.history[-1]

    @property
    def steps(self) -> int:
        """Steps up to the last checkpoint: the ones whose weights are kept."""
        return max(self.checkpoints, default=0)

    @property
    def segments(self) -> tuple[RunSegment, ...]:
        """The starts that led to what there is now, each from its step to the next one's.

        A start that resumed from an earlier step than a former one did has taken that one's steps again.
        """
        led: list[RunSegment] = []
        for start in reversed(self.history):
            if not led or start.step < led[-1].step:
                led.append(start)
        return tuple(reversed(led))

    @property
    def linked(self) -> tuple[int, bytes]:
        """The last checkpoint up to which the chain is known, and its link there."""
        known = max((step for step, point in self.checkpoints.items() if point.chain), default=0)
        return (known, bytes.fromhex(self.checkpoints[known].chain or "")) if known else (0, FIRST_LINK)

    def restarted(self, start: RunSegment) -> Receipt:
        """Continue with a new start; what came after the step it begins at has not led anywhere."""
        kept = {step: point for step, point in self.checkpoints.items() if step <= start.step}
        return replace(self, history=(*self.history, start), checkpoints=kept, finished=False)

    def saved(self, step: int, point: Point) -> Receipt:
        """Add a checkpoint; one whose weights nobody hashed is refused."""
        try:
            documents.check_weights_sha256(point.weights_sha256)
        except documents.DocumentError as error:
            raise InputError(f"no receipt can be kept of step {step}: {error}.") from error
        return replace(self, checkpoints={**self.checkpoints, step: point})

    def write(self, folder: Path, *, durable: bool = True) -> None:
        """Put the document into a run folder in place of the one before, at once; `durable` waits for the disk."""
        partial = folder / f".{NAME}.partial-{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with partial.open("w", encoding="utf-8") as file:
                # A line for each fact. What json calls indentation is ten times slower, and workers may be waiting.
                file.write(json.dumps(self._document(), separators=(",\n", ": ")) + "\n")
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(folder / NAME)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise RecordsError(
                f"{folder / NAME} cannot be written: {error.strerror}. Make room there."
            ) from error

    def _document(self) -> dict[str, Any]:
        end = self.checkpoints.get(self.steps)
        return {
            "format": FORMAT,
            "name": self.name,
            "seed": self.seed,
            "shards": self.shards,
            "shards_from": self.shards_from,
            "batch_size": self.batch_size,
            **{key: value for key, value in vars(self.last).items() if key not in _OF_ONE_START},
            "steps": self.steps,
            "finished": self.finished,
            "weights_sha256": None if end is None else end.weights_sha256,
            "chain": None if end is None else end.chain,
            "checkpoints": {str(step): vars(point) for step, point in sorted(self.checkpoints.items())},
            "history": [vars(self.history[0]), *(_changed(*pair) for pair in pairwise(self.history))],
        }

    @classmethod
    def read(cls, folder: Path) -> Receipt:
        """Read the receipt of a run folder; one that contradicts itself, or holds the hash of nothing, is refused."""
        path = folder / NAME
        try:
            document = documents.read_object(path)
        except FileNotFoundError:
            raise InputError(f"there is no {NAME} in {folder}. Give the folder of a run (--out).") from None
        except documents.DocumentError as error:
            raise InputError(f"{path} {error}. {_REMEDY}") from error
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}). {_REMEDY}") from error
        if document.get("format") not in READABLE:
            raise InputError(
                f"{path} has format {documents.shown(document.get('format'))}, and this version of paceline reads "
                f"up to {FORMAT}. Use the version that wrote it."
            )
        try:
            made = cls._parsed(document)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path} is not a receipt ({_told(error)}). {_REMEDY}") from error
        changed = made.contradiction(document)
        if changed is not None:
            raise InputError(f"{path} was changed: {changed}. {_REMEDY}")
        return made

    @classmethod
    def _parsed(cls, document: dict[str, Any]) -> Receipt:
        documents.check_fields(document, cls)
        if not document["history"]:
            raise documents.DocumentError("it tells of no start")
        for start in document["history"]:
            documents.check_fields(start, RunSegment, where="history: ")
        checkpoints = {}
        for step, point in document["checkpoints"].items():
            documents.check_weights_sha256(point["weights_sha256"])
            if point["chain"] is not None and not documents.is_sha256(point["chain"]):
                raise documents.DocumentError(f"the chain at step {step} is no hash")
            if re.fullmatch(r"[1-9][0-9]{0,39}", step) is None:
                raise documents.DocumentError(
                    f"the step {documents.shown(step)} of a checkpoint is no number from 1"
                )
            checkpoints[documents.number("the step of a checkpoint", int(step), ranges.STEPS)] = Point(
                **point
            )
        made = cls(
            name=document["name"],
            seed=documents.number("seed", document["seed"], ranges.SEED),
            shards=documents.number("shards", document["shards"], ranges.SHARDS),
            batch_size=documents.number("batch_size", document["batch_size"], ranges.COUNT),
            shards_from=document.get("shards_from", ""),
            history=_restored(document["history"]),
            checkpoints=checkpoints,
            finished=document["finished"],
        )
        for start in made.history:
            _check_numbers(start, made)
        return made

    def contradiction(self, document: Mapping[str, Any]) -> str | None:
        """Return which of the facts that stand in a document twice is not the same in both places; None if none is."""
        made = json.loads(json.dumps(self._document()))
        for name in sorted(document.keys() - {"format", "history", "checkpoints"}):
            if name not in made:
                return f"nothing in a receipt is called {documents.shown(name)}"
            if document[name] != made[name]:
                whose = (
                    "the last checkpoint" if name in _OF_LAST_CHECKPOINT else "the last start in its history"
                )
                return (
                    f"{name} at its top is {documents.shown(document[name])}, but {whose} has "
                    f"{documents.shown(made[name])}"
                )
        missing = next((name for name in _OF_LAST_CHECKPOINT if name not in document), None)
        return None if missing is None else f"{missing} at its top is missing"


_OF_LAST_CHECKPOINT = ("steps", "weights_sha256", "chain")
_RANGES = {
    "generation": ranges.GENERATION,
    "step": ranges.STEPS_TAKEN,
    "epoch": ranges.EPOCH,
    "step_of_epoch": ranges.STEPS_TAKEN,
    "workers": ranges.WORKERS,
    "processes": ranges.PROCESSES,
    "samples": ranges.SAMPLES,
    "repeats": ranges.COUNT,
    "order_seed": ranges.SEED,
    "micro_batch": ranges.COUNT,
    "num_workers": ranges.LOADERS,
    "horizon": ranges.HORIZON,
    # Whoever did not ask for threads has as many as the machine.
    "threads": ranges.COUNT,
}
"""Of every whole number of a start, as far as it is not null."""


def _check_numbers(start: RunSegment, receipt: Receipt) -> None:
    for name, within in _RANGES.items():
        if (number := getattr(start, name)) is not None:
            documents.number(f"history: {name}", number, within)
    if start.max_grad_norm is not None:
        documents.number("history: max_grad_norm", start.max_grad_norm, ranges.CLIP)
    # A map-style data set of nothing is refused before a run begins.
    if not start.stream and not start.samples:
        raise documents.DocumentError(f"history: samples is {start.samples}, but must be at least 1")
    if start.stream and (start.step_of_epoch + receipt.steps) * receipt.batch_size > ranges.SAMPLES.high:
        raise documents.DocumentError(
            f"history: step_of_epoch is {start.step_of_epoch}: no stream has so many batches of {receipt.batch_size}"
        )
    if start.shares is not None and (min(start.shares, default=0) < 0 or sum(start.shares) != receipt.shards):
        raise documents.DocumentError(
            f"history: shares is {documents.shown(start.shares)}, which do not make up {receipt.shards} shards"
        )


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, documents.DocumentError) else repr(error)


_REMEDY = "Restore it from a copy, or remove it to go on without what it knew."
_OF_ONE_START = ("generation", "step", "epoch", "step_of_epoch")


def _changed(before: RunSegment, start: RunSegment) -> dict[str, Any]:
    old = vars(before)
    return {name: value for name, value in vars(start).items() if value != old[name]}


def _restored(history: Sequence[Mapping[str, Any]]) -> tuple[RunSegment, ...]:
    starts: list[RunSegment] = []
    facts: dict[str, Any] = {}
    for changed in history:
        facts |= changed
        if facts.get("shares") is not None:
            facts["shares"] = tuple(facts["shares"])
        starts.append(RunSegment(**facts))
    return tuple(starts)


def environment_differences(there: RunSegment, here: RunSegment) -> list[str]:
    """Return what the bits depend on and is not the same at two starts, one line each."""
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

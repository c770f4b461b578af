"""What is to be submitted: a training, as the command that each machine starts, and what it needs. Imports no torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import strategies
from paceline.errors import InputError
from paceline.launch.submit.options import SubmitOptions
from paceline.option_fields import flag
from paceline.training.options import RunOptions

OWN = ("nodes", "out", "resume", "rendezvous", "lead", "secret_file")
"""Options of the training that the job itself decides or repeats."""
LONGEST_LABEL = 41
"""With `paceline-` in front and what Kubernetes appends, it is still a name that is part of a host's name."""


@dataclass(frozen=True, kw_only=True)
class SubmitRequest:
    """One training to submit."""

    task: str
    """As the command line takes it."""
    arguments: tuple[str, ...]
    """The options of the training, as the command line takes them."""
    options: RunOptions
    submit: SubmitOptions
    threads: int | None = None

    @property
    def out(self) -> Path:
        """The run folder."""
        if self.options.out is None:
            raise InputError("a job needs a run folder. Give --out.")
        if not str(self.options.out).isprintable():
            raise InputError(
                f"--out {str(self.options.out)!r} has signs that cannot be printed, which no job takes. Choose another."
            )
        return self.options.out

    @property
    def nodes(self) -> tuple[int, int]:
        """From how many to how many machines."""
        first, _, last = str(self.options.nodes).partition(":")
        return int(first), int(last or first)

    @property
    def cores(self) -> int:
        """The cores of each machine."""
        each = (self.threads or 1) + self.options.num_workers
        return self.submit.cpus_per_node or self.options.processes * each

    @property
    def name(self) -> str:
        """What the job is called."""
        return self.submit.job_name or "paceline-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", self.out.name).strip(
            "-"
        )

    def train(self, paceline: tuple[str, ...], *, out: str, meeting: str) -> tuple[str, ...]:
        """Return the command of each machine; `meeting` is where machines meet, where there are several."""
        command = (*paceline, "train", self.task, *self.arguments, "--out", out)
        return (
            (*command, "--nodes", str(self.options.nodes), "--rendezvous", meeting)
            if self.nodes[1] > 1
            else command
        )


def workers_of(said: Mapping[str, Any], gpus: int) -> int | None:
    """Return how many workers a machine has where nobody says so: one for each GPU; None where the strategy decides."""
    strategy = said.get("strategy", RunOptions.strategy)
    if "workers" in said or not gpus or "=" in strategy or "," in strategy:
        return None
    return gpus if strategies.entry(strategy).processes is None else None


def arguments(given: Mapping[str, Any], settings: Mapping[str, str], threads: int | None) -> tuple[str, ...]:
    """Write options back as the command line takes them, but for those that the job decides."""
    words: list[str] = []
    for name, value in given.items():
        if name in OWN:
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        else:
            words += _written(flag(name), str(value))
    for key, text in settings.items():
        words += _written("--set", f"{key}={text}")
    return (*words, *(() if threads is None else ("--threads", str(threads))))


def _written(name: str, value: str) -> list[str]:
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


def label(text: str, *, whole: str) -> str:
    """Return a text as a name that Kubernetes takes as part of a host's name; what counts workers is appended to it.

    Where that is not the `whole` name as it was given, a part of its hash is appended: other names have other labels.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not plain or not plain[0].isalpha():
        plain = f"run-{plain}".strip("-")
    if plain == whole and len(plain) <= LONGEST_LABEL:
        return plain
    digest = hashlib.sha256(whole.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{plain[: LONGEST_LABEL - len(digest) - 1].strip('-')}-{digest}"

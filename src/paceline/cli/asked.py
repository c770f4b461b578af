"""Puts together what a run is asked to do: the command line before a file of options before what a resumed run had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import option_fields
from paceline.cli.config_file import SETTINGS, THREADS
from paceline.cli.generated import Given
from paceline.cli.options import new_folder
from paceline.errors import InputError
from paceline.launch.resumed import options_over, overrides_over, spec_over
from paceline.option_fields import known_options
from paceline.strategies.tuning import Tuning
from paceline.tasks.names import resolve, task_of
from paceline.training import folder
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec

_FIXED = ("shards", "out", "resume")


@dataclass(frozen=True)
class Asked:
    """What a run is asked to do."""

    spec: TrainSpec
    options: RunOptions
    threads: int | None
    notes: tuple[str, ...]
    """What had to be chosen otherwise than a resumed run had it."""

    @classmethod
    def of(cls, task: str, said: Mapping[str, Any], before: Mapping[str, Any], out: Path | None) -> Asked:
        """Read what was `said`, over the spec of the run `before` that is resumed, which may be empty."""
        reference, name = resolve(task)
        options, notes = options_over(said, before, out if out is not None else new_folder(name))
        return cls(
            spec_over(reference, name, said, before), options, said.get(THREADS, before.get(THREADS)), notes
        )

    @classmethod
    def together(
        cls, task: str, file: Given, given: Given, before: Mapping[str, Any], out: Path | None
    ) -> Asked:
        """Read the command line (`given`) over a file; what in the file does not go with it is fitted, with a note."""
        try:
            return cls.of(task, _over(file, given), before, out).checked()
        except InputError as refused:
            try:
                cls.of(task, file, before, out).checked()
            except InputError:  # the file alone cannot be either, so there is nothing to fit
                raise refused from None
        fixed = {name: file[name] for name in _FIXED if name in file}
        made = cls.of(task, {**fixed, **given}, _spec_of(file, before), out)
        words = "the run had" if before else "the file has"
        return replace(made, notes=tuple(note.replace("the run had", words, 1) for note in made.notes))

    @classmethod
    def for_command(cls, command: str, task: str | None, file: Given, given: Given) -> tuple[str, Asked]:
        """Return the task as it was typed, or as the resumed run had it, and what a command of this name is asked to do."""
        said = {**file, **given}
        out = option_fields.folder("--out", said["out"]) if "out" in said else None
        if said.get("resume") and out is None:
            raise InputError("--resume needs the folder of the run to resume. Give --out.")
        before = folder.read_spec(out) if said.get("resume") and out is not None else {}
        task = task if task is not None else file.get("task", task_of(before))
        if task is None:
            looked = f": {out} holds no run of paceline train that has one" if said.get("resume") else ""
            raise InputError(f"Missing argument 'task'{looked}. See paceline {command} --help.")
        asked = cls.together(task, file, given, before, out)
        folder.check_resumed(asked.options)
        return task, asked

    def checked(self) -> Asked:
        """Return this; raise InputError where the strategy cannot have so many workers."""
        _ = self.options.processes
        return self


def _over(file: Given, given: Given) -> Given:
    settings = {**file.get(SETTINGS, {}), **given.get(SETTINGS, {})}
    return {**file, **given, **({SETTINGS: settings} if settings else {})}


def _spec_of(file: Given, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a run that the file says, over the one `before` it."""
    had = before.get("options", {})
    run = {name: file[name] for name in known_options(RunOptions) if name in file}
    tuning = {name: file[name] for name in known_options(Tuning) if name in file}
    told = {name: file[name] for name in (*known_options(TrainSpec), THREADS) if name in file}
    return {
        **before,
        **told,
        SETTINGS: {**before.get(SETTINGS, {}), **file.get(SETTINGS, {})},
        "overrides": overrides_over(file, before),
        "options": {
            "strategy": RunOptions.strategy,
            **had,
            **run,
            "tuning": {**had.get("tuning", {}), **tuning},
        },
    }

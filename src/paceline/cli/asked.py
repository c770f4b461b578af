"""Puts together what a run is asked to do: the command line before a file of options before what a resumed run had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cli import resumed
from paceline.cli.config_file import SETTINGS, THREADS, known_options
from paceline.cli.folders import new_folder
from paceline.cli.generated import Given
from paceline.cli.reference import resolve
from paceline.errors import InputError
from paceline.strategies.tuning import Tuning
from paceline.training.options import RunOptions
from paceline.training.spec import OVERRIDES, TrainSpec

_ENDS = ("epochs", "steps")
_FIXED = ("shards", "out", "resume")
_LAYOUT = ("strategy", "workers", "servers", "shards", "out", "resume")
"""What is not simply kept: it is fitted, looked up, or said each time."""


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
        options, notes = _options(said, before, out if out is not None else new_folder(name))
        return cls(
            _spec(reference, name, said, before), options, said.get(THREADS, before.get(THREADS)), notes
        )

    @classmethod
    def together(
        cls, task: str, file: Given, given: Given, before: Mapping[str, Any], out: Path | None
    ) -> Asked:
        """Read the command line (`given`) over a file; what in the file does not go with it is fitted, with a note."""
        try:
            return cls.of(task, _over(file, given), before, out).checked()
        except InputError:
            if not cls._holds(task, file, before, out):
                raise
        fixed = {name: file[name] for name in _FIXED if name in file}
        made = cls.of(task, {**fixed, **given}, _spec_of(file, before), out)
        words = "the run had" if before else "the file has"
        return replace(made, notes=tuple(note.replace("the run had", words, 1) for note in made.notes))

    def checked(self) -> Asked:
        """Return this; raise InputError where the strategy cannot have so many workers."""
        _ = self.options.processes
        return self

    @classmethod
    def _holds(cls, task: str, file: Given, before: Mapping[str, Any], out: Path | None) -> bool:
        try:
            cls.of(task, file, before, out).checked()
        except InputError:
            return False
        return True


def _over(file: Given, given: Given) -> Given:
    settings = {**file.get(SETTINGS, {}), **given.get(SETTINGS, {})}
    return {**file, **given, **({SETTINGS: settings} if settings else {})}


def _spec_of(file: Given, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a run that the file says, over the one `before` it."""
    had = before.get("options", {})
    run = {name: file[name] for name in known_options((RunOptions,)) if name in file}
    tuning = {name: file[name] for name in known_options((Tuning,)) if name in file}
    told = {name: file[name] for name in (*known_options((TrainSpec,)), THREADS) if name in file}
    return {
        **before,
        **told,
        SETTINGS: {**before.get(SETTINGS, {}), **file.get(SETTINGS, {})},
        "overrides": _overrides(file, before),
        "options": {
            "strategy": RunOptions.strategy,
            **had,
            **run,
            "tuning": {**had.get("tuning", {}), **tuning},
        },
    }


def _spec(reference: str, name: str, said: Mapping[str, Any], before: Mapping[str, Any]) -> TrainSpec:
    plain = {key: said.get(key, before.get(key)) for key in known_options((TrainSpec,))}
    if any(key in said for key in _ENDS):
        plain |= {key: said.get(key) for key in _ENDS}
    settings = {**before.get(SETTINGS, {}), **said.get(SETTINGS, {})}
    return TrainSpec(
        task=reference, name=name, settings=settings, overrides=_overrides(said, before), **plain
    )


def _overrides(said: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {**before.get("overrides", {}), **{key: said[key] for key in OVERRIDES if key in said}}


def _options(
    said: Mapping[str, Any], before: Mapping[str, Any], out: Path
) -> tuple[RunOptions, tuple[str, ...]]:
    had = before.get("options", {})
    plain = [name for name in known_options((RunOptions,)) if name not in (*_LAYOUT, *OVERRIDES)]
    kept = {name: had[name] for name in plain if name in had}
    if str(said.get("nodes", "")) == "1":
        kept.pop("rendezvous", None)  # this machine alone
    now = {**kept, **{name: said[name] for name in plain if name in said}}
    layout = resumed.lay_out(
        had,
        strategy=said.get("strategy"),
        workers=said.get("workers"),
        servers=said.get("servers"),
        shards=said.get("shards"),
        nodes=str(now.get("nodes", "1")),
    )
    tuned, unused = resumed.usable(layout.strategy, had.get("tuning", {}))
    own = {name: said[name] for name in known_options((Tuning,)) if name in said}
    made = RunOptions(
        **{
            **now,
            "min_workers": 1,
            **_overrides(said, before),
            "strategy": layout.strategy,
            "workers": layout.workers,
            "servers": layout.servers,
            "shards": said.get("shards"),
            "tuning": Tuning(**resumed.tuned(layout.strategy, tuned, own)),
            "out": out,
            "resume": said.get("resume", False),
        }
    )
    fewest, notes = resumed.fewest_workers(made, kept.get("min_workers", 1), said.get("min_workers"))
    return fewest, (*layout.notes, *unused, *notes)

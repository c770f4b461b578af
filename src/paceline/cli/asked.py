"""Puts together what a run is asked to do: the command line before a file of options before what a resumed run had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli import resumed
from paceline.cli.config_file import SETTINGS, THREADS, known_options
from paceline.cli.folders import new_folder
from paceline.cli.reference import resolve
from paceline.strategies.tuning import Tuning
from paceline.training.options import RunOptions
from paceline.training.spec import OVERRIDES, TrainSpec

_ENDS = ("epochs", "steps")
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

"""The options of a run: what is said now, over what a resumed run was begun with, as far as the strategy has a use for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from paceline import strategies
from paceline.errors import InputError
from paceline.option_fields import flag, known_options
from paceline.strategies.tuning import Tuning, check_use, serves
from paceline.training.by_value import Payload
from paceline.training.launcher_values import LauncherValues
from paceline.training.options import RunOptions
from paceline.training.spec import OVERRIDES, TrainSpec
from paceline.world import env
from paceline.world.mesh import Mesh

MOST = 1 << 16
"""More workers than a run ever had."""
_ENDS = ("epochs", "steps")
_LAYOUT = ("strategy", "workers", "servers", "shards", "out", "resume")
"""What is not simply kept: it is fitted, looked up, or said each time."""


def options_over(
    said: Mapping[str, Any], before: Mapping[str, Any], out: Path | None
) -> tuple[RunOptions, tuple[str, ...]]:
    """Return the options that were `said`, over those in the spec of the run `before`, and what had to be chosen otherwise.

    The spec may be empty. A name that is not in `said` was not said.
    """
    had = before.get("options", {})
    plain = [name for name in known_options(RunOptions) if name not in (*_LAYOUT, *OVERRIDES)]
    kept = {name: had[name] for name in plain if name in had}
    for name in ("lead", "secret_file"):  # each machine says it for itself, each time
        kept.pop(name, None)
    if str(said.get("nodes", "")) == "1":
        kept.pop("rendezvous", None)  # this machine alone
    now = {**kept, **{name: said[name] for name in plain if name in said}}
    identity = env.identity()
    layout = lay_out(
        had,
        strategy=said.get("strategy"),
        workers=said.get("workers"),
        servers=said.get("servers"),
        shards=said.get("shards"),
        nodes=str(now.get("nodes", RunOptions.nodes)),
        joined=None if identity is None else identity.size,
    )
    tuning, unused = usable(layout.strategy, had.get("tuning", {}))
    own = {name: said[name] for name in known_options(Tuning) if name in said}
    made = RunOptions(
        **{
            **now,
            "min_workers": RunOptions.min_workers,
            **overrides_over(said, before),
            "strategy": layout.strategy,
            "workers": layout.workers,
            "servers": layout.servers,
            "shards": said.get("shards"),
            "tuning": Tuning(**tuned(layout.strategy, tuning, own)),
            "out": out,
            "resume": said.get("resume", False),
        }
    )
    fewest, notes = fewest_workers(
        made, kept.get("min_workers", RunOptions.min_workers), said.get("min_workers")
    )
    return fewest, (*layout.notes, *unused, *notes)


def overrides_over(said: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said now, or was `before`, against the task's own opinion."""
    return {**before.get("overrides", {}), **{name: said[name] for name in OVERRIDES if name in said}}


def spec_over(
    reference: str,
    name: str,
    said: Mapping[str, Any],
    before: Mapping[str, Any],
    shipped: Payload | None = None,
    launcher: LauncherValues | None = None,
) -> TrainSpec:
    """Return what a training is asked to do: what was `said`, over the spec of the run `before`, which may be empty."""
    plain = {key: said.get(key, before.get(key)) for key in known_options(TrainSpec)}
    if any(key in said for key in _ENDS):
        plain |= {key: said.get(key) for key in _ENDS}
    return TrainSpec(
        task=reference,
        name=name,
        settings={**before.get("settings", {}), **said.get("settings", {})},
        overrides=overrides_over(said, before),
        shipped=shipped,
        launcher=launcher or LauncherValues(),
        **plain,
    )


@dataclass(frozen=True)
class Layout:
    """The workers of a run, and what had to be chosen otherwise than the run was begun with."""

    strategy: str
    workers: int
    servers: int | None
    notes: tuple[str, ...] = ()


def lay_out(
    kept: Mapping[str, Any],
    *,
    strategy: str | None,
    workers: int | None,
    servers: int | None,
    shards: int | None,
    nodes: str,
    joined: int | None = None,
) -> Layout:
    """Choose strategy and numbers: as asked for; where nobody asks, as the run was begun, as far as that fits.

    What was asked for is never changed here: where it cannot work, `RunOptions` refuses it. In a world of `joined` processes
    that somebody else has started, their number is the one that was asked for.
    """
    before = kept.get("strategy")
    chosen = strategy if strategy is not None else before or RunOptions.strategy
    shards = shards if shards is not None else kept.get("shards")

    def fits(text: str, count: int) -> bool:
        try:
            processes = RunOptions(
                strategy=text, workers=count, servers=served(text), shards=shards, nodes=nodes
            ).processes
        except InputError:
            return False
        return joined in (None, processes)

    def served(text: str) -> int | None:
        return servers if servers is not None or not strategies.choice(text).servers else kept.get("servers")

    notes = []
    alone = strategies.entry(chosen).processes == 1
    if joined is not None and (not alone or (strategy is None and joined > 1)):
        beside = served(chosen)
        workers = max(1, joined - (strategies.choice(chosen).servers if beside is None else beside))
    if workers is not None:
        if strategy is None and before is not None and not fits(before, workers):
            chosen = _refitted(before, workers)
            chosen = chosen if fits(chosen, workers) else before
    else:
        named = strategies.choice(chosen)
        usual = kept.get("workers", RunOptions.workers)
        smallest = Mesh.of({side: size for side, size in named.sizes if size is not None}).workers
        candidates = chain(range(min(usual, MOST), 0, -1), [smallest])
        workers = named.workers or next((count for count in candidates if fits(chosen, count)), usual)
        if before is not None and workers != usual and "workers" in kept:
            notes.append(f"the run had {usual} workers; --strategy {chosen} goes on with {workers} here.")
    if before is not None and strategy is None and chosen != before:
        notes.append(
            f"the run had --strategy {before}, which {workers} workers do not fit: {chosen} goes on."
        )
    left = kept.get("servers")
    if left is not None and servers is None and not strategies.choice(chosen).servers:
        notes.append(
            f"the run had --servers {left}, which --strategy {chosen} has no use for: it is left out."
        )
    return Layout(chosen, workers, served(chosen), tuple(notes))


def _refitted(before: str, workers: int) -> str:
    """Return the strategy nearest to the one before that so many workers can carry."""
    if strategies.entry(before).processes is not None:
        return "ddp"
    choice = strategies.choice(before)
    mesh = choice.fitted(workers + choice.servers)
    return ",".join(f"{side}={size}" for side, size in mesh.sizes)


def _as_said(name: str, value: Any) -> str:
    """Return an option as the command line has it."""
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no_{name}")
    return f"{flag(name)} {value}"


def usable(strategy: str, before: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the tuning of a run's beginning that a strategy has a use for, and a note for each option it has not."""
    choice = strategies.choice(strategy)
    sides = dict(choice.sizes)
    defaults = known_options(Tuning)
    idle = {name for name in before if name in defaults and not serves(name, choice.name, sides)}
    notes = tuple(
        f"the run had {_as_said(name, before[name])}, which --strategy {strategy} has no use for: it is left out."
        for name in before
        if name in idle and before[name] != defaults[name]
    )
    return {name: value for name, value in before.items() if name not in idle}, notes


def tuned(strategy: str, before: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Put what was said, if the strategy has a use for it, over what a resumed run was begun with."""
    strange = sorted(before.keys() - known_options(Tuning).keys())
    if strange:
        raise InputError(
            f"the run was begun with {strange[0]} = {before[strange[0]]!r}, which this version of paceline does not know. "
            "Go on with the version that began it, or take it out of spec.json."
        )
    return {**before, **said_for((strategy,), said)}


def said_for(names: tuple[str, ...], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were said, each of which must mean something to one of the strategies."""
    chosen = {text: strategies.choice(text) for text in names}
    check_use(said, {text: (one.name, dict(one.sizes)) for text, one in chosen.items()})
    return dict(said)


def fewest_workers(options: RunOptions, before: int, said: int | None) -> tuple[RunOptions, tuple[str, ...]]:
    """Fill in --min-workers: as asked for, or as the run had it, but no more than there are workers."""
    if said is not None:
        return replace(options, min_workers=said), ()
    most = options.workers * options.max_nodes + options.total_servers
    if before <= most:
        return replace(options, min_workers=before), ()
    note = f"the run had --min-workers {before}, and there are {most} now: it goes on down to {most}."
    return replace(options, min_workers=most), (note,)

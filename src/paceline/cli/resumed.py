"""What a resumed run takes over from its beginning: never more than the strategy chosen now has a use for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline import strategies
from paceline.errors import InputError
from paceline.strategies.tuning import Tuning, check_use, serves
from paceline.training.options import RunOptions
from paceline.world.mesh import Mesh


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
) -> Layout:
    """Choose strategy and numbers: as asked for; where nobody asks, as the run was begun, as far as that fits.

    What was asked for is never changed here: where it cannot work, `RunOptions` refuses it.
    """
    before = kept.get("strategy")
    chosen = strategy or before or "ddp"
    shards = shards if shards is not None else kept.get("shards")

    def fits(text: str, count: int) -> bool:
        try:
            _ = RunOptions(
                strategy=text, workers=count, servers=served(text), shards=shards, nodes=nodes
            ).processes
        except InputError:
            return False
        return True

    def served(text: str) -> int | None:
        return servers if servers is not None or not strategies.choice(text).servers else kept.get("servers")

    notes = []
    if workers is not None:
        if strategy is None and before is not None and not fits(before, workers):
            chosen = _refitted(before, workers)
            chosen = chosen if fits(chosen, workers) else before
    else:
        named = strategies.choice(chosen)
        usual = kept.get("workers", 1)
        smallest = Mesh.of({side: size for side, size in named.sizes if size is not None}).workers
        candidates = (*range(usual, 0, -1), smallest)
        workers = named.workers or next((count for count in candidates if fits(chosen, count)), usual)
        if before is not None and workers != usual and named.workers is None:
            notes.append(f"the run had {usual} workers; --strategy {chosen} goes on with {workers} here.")
    if before is not None and strategy is None and chosen != before:
        notes.append(
            f"the run had --strategy {before}, which {workers} workers do not fit: {chosen} goes on."
        )
    return Layout(chosen, workers, served(chosen), tuple(notes))


def _refitted(before: str, workers: int) -> str:
    """Return the strategy nearest to the one before that so many workers can carry."""
    if strategies.entry(before).processes is not None:
        return "ddp"
    choice = strategies.choice(before)
    mesh = choice.fitted(workers + choice.servers)
    return ",".join(f"{side}={size}" for side, size in mesh.sizes)


def usable(strategy: str, before: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the tuning of a run's beginning that a strategy has a use for, and a note for each option it has not."""
    choice = strategies.choice(strategy)
    sides = dict(choice.sizes)
    defaults = {one.name: one.default for one in fields(Tuning)}
    idle = {name for name in before if name in defaults and not serves(name, choice.name, sides)}
    notes = tuple(
        f"the run had --{name.replace('_', '-')} {before[name]}, which --strategy {strategy} has no use for: it is left out."
        for name in before
        if name in idle and before[name] != defaults[name]
    )
    return {name: value for name, value in before.items() if name not in idle}, notes


def tuned(strategy: str, before: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Put what was said, if the strategy has a use for it, over what a resumed run was begun with."""
    strange = sorted(before.keys() - {one.name for one in fields(Tuning)})
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
    """Fill in the fewest workers that a run goes on with: as asked for, or as it had it, as far as there are so many."""
    if said is not None:
        return replace(options, min_workers=said), ()
    most = options.workers * options.max_nodes + options.total_servers
    if before <= most:
        return replace(options, min_workers=before), ()
    note = f"the run had --min-workers {before}, and there are {most} now: it goes on down to {most}."
    return replace(options, min_workers=most), (note,)

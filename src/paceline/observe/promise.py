"""What a level of exactness promises for a run, in words that are true of it: the bits depend on the shards."""

from __future__ import annotations

from paceline.observe import formats

MEANING = {
    "bitwise": "same bits for any number of workers",
    "numeric": "same answer up to rounding for any number of workers",
}
"""What each level promises for one number of shards."""
STATISTICAL = "same answer only in expectation"
FOLLOWS = "workers"
"""What `shards_from` is where nobody said how many shards there are, and so there is one per worker."""


def promise(level: str, shards: int | None, shards_from: str | None) -> str:
    """Return what the level means; where the shards follow the workers, with the option that gives the same bits elsewhere."""
    if level not in MEANING:
        return STATISTICAL if level == "statistical" else ""
    if shards is None:
        return MEANING[level]
    if shards_from == FOLLOWS and shards == 1:
        return "one shard, for one worker: --shards V gives the same bits for 1 to V workers"
    if shards_from == FOLLOWS:
        return f"{MEANING[level]} with --shards {shards}"
    return f"{MEANING[level]} ({formats.plural(shards, 'shard')})"

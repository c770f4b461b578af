"""What `--compress` asks for: the exchange that carries gradients, and what it leaves of the promise."""

from __future__ import annotations

from paceline.errors import InputError
from paceline.reduce.compress import TYPES, CastExchange, CompressedExchange, PowerExchange
from paceline.reduce.exchange import Layout, over_sockets
from paceline.strategies.base import Exactness, StrategyInputs
from paceline.world import World


def level(compress: str) -> Exactness:
    """Return what a way of compression leaves of the promise."""
    if compress == "none":
        return Exactness.BITWISE
    return Exactness.NUMERIC if compress in TYPES else Exactness.STATISTICAL


def open_compressed(inputs: StrategyInputs, world: World) -> CompressedExchange:
    """Make the exchange that a run asked for."""
    kind, _, rank = inputs.tuning.compress.partition(":")
    exact = over_sockets(world.comm, Layout.of_workers(world, inputs.shards))
    if kind in TYPES:
        return CastExchange(world.comm, exact, TYPES[kind])
    if inputs.precision.name == "fp16":
        raise InputError(
            "--compress powersgd adds what one step missed to the next, and the loss scaler of --precision fp16 changes the "
            "scale in between. Use --precision bf16, or --compress bf16."
        )
    return PowerExchange(world.comm, exact, int(rank))

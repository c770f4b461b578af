"""A worker's part of the state, kept while the user's function goes by calls of `run.steps` that are over.

A worker that joins is given the state in its first call of `run.steps`, or where it asks what was measured before that. What
stands between the calls that it goes by (a schedule's step, a change of weights) is in that state already, and is done to it
once more: it is put back.
"""

from __future__ import annotations

import copy

from torch import Tensor

from paceline.recovery.peer_snapshots import to_host
from paceline.state.chunks import ChunkBounds
from paceline.strategies.replica import Replica
from paceline.training.user_loop.loop_state import LoopState, Values


class KeptState:
    """The state as it is now, in memory of its own."""

    def __init__(self, replica: Replica, registered: LoopState, states: Values | None = None) -> None:
        """`states` are the loop's own, where some of them may not be registered yet."""
        held = replica.local_state()
        self._chunks, self._extra_state = to_host(held.chunks), copy.deepcopy(held.extra_state)
        self._states = registered.snapshot() if states is None else states

    def put_back(self, replica: Replica, registered: LoopState) -> None:
        """Load the kept state back."""
        replica.load_local_state(
            {key: chunk.meta for key, chunk in self._chunks.items()}, self._read, self._extra_state
        )
        if self._states:
            registered.load(self._states)

    def _read(self, key: str, bounds: ChunkBounds) -> Tensor:
        chunk = self._chunks[key]
        if chunk.bounds != bounds:
            raise RuntimeError(f"{key} was put aside as another part than the one that is asked for")
        return chunk.values

"""Checkpoints as one process writes and reads them, without a run: what most tests of their files need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint import store
from paceline.checkpoint.contents import CheckpointMetadata, Contents, plain_extra_state, written
from paceline.checkpoint.durable import committing
from paceline.checkpoint.planning import ShardInventory, assign_writers
from paceline.checkpoint.read import Loaded, read
from paceline.checkpoint.tensors import dense
from paceline.errors import CheckpointError
from paceline.state.chunks import MODEL, split


class Checkpoints(store.Checkpoints):
    """The folder of one run, for a process that holds the whole state."""

    def newest(self, report: Callable[[Path, str], None]) -> Loaded | None:
        """Read the newest whole checkpoint; each damaged one above it goes to `report` with the reason."""
        damaged: set[Path] = set()
        while paths := [path for path in self.committed() if path not in damaged]:
            newest = paths[-1]
            try:
                return read(newest)
            except CheckpointError as error:
                # One that is gone was deleted while we read, by a writer that had committed a newer one: look again.
                if newest in self.committed():
                    damaged.add(newest)
                    report(newest, str(error))
        return None

    def save(self, step: int, state: Mapping[str, Any], *, note: Callable[[str], None] | None = None) -> Path:
        """Commit the whole state of a run under a step, then delete all but the last `keep` checkpoints.

        A step that is there already with the same state stays as it is; a damaged one is replaced. A save that fails
        raises CheckpointError, a DiskFaultError where the next one may succeed. What cannot be deleted
        after the commit goes to `note` as one line; without a `note` that is a CheckpointError too.
        """
        contents = contents_of(step, state)
        pending = self.pending(step)
        with committing(pending.partial, pending.final):
            self.write_alone(pending, contents)
        self.prune(pending.final, note or _refuse)
        return pending.final


def _refuse(message: str) -> None:
    raise CheckpointError(message)


def contents_of(step: int, state: Mapping[str, Any]) -> Contents:
    """Take apart the whole state of a run, position and meta included, for one process that writes it alone."""
    metadata = CheckpointMetadata(step=step, position=dict(state["position"]), meta=dict(state["meta"]))
    metadata.check()
    held = split(
        {key: value for key, value in state.items() if key not in ("position", "meta")}
        | {MODEL: {name: dense(value, name) for name, value in state[MODEL].items()}}
    )
    plan = assign_writers([ShardInventory.of("", held.chunks)])
    return Contents(
        metadata=metadata,
        plan=plan,
        tensors=written(held.chunks, plan.keys[0]),
        extra_state=plain_extra_state(held.extra_state),
    )

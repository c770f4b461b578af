"""What a worker is asked before a run: in a module of its own, because a worker imports the whole of it to answer.

Beside the launcher's code it took 0.25 s of every start to import that.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.training.spec import TrainSpec


@dataclass(frozen=True)
class ReadShards:
    """Return the shards that a task asks for, read where torch is loaded: the launcher imports no code of the user's."""

    spec: TrainSpec

    def __call__(self, worker: object) -> int | None:  # noqa: ARG002  (it joins no group)
        """Make the task and look."""
        from paceline.training.reference import make_task

        return make_task(self.spec).shards

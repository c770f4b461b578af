"""What goes into one checkpoint: the chunks this worker writes, and what the manifest says of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.file_record import FileRecord
from paceline.checkpoint.fingerprint import weights_sha256
from paceline.checkpoint.manifest import MODEL_PREFIX, Manifest
from paceline.checkpoint.parts import StoredTensors
from paceline.checkpoint.planning import WritePlan
from paceline.checkpoint.tensors import dense, plain
from paceline.errors import CheckpointError
from paceline.state.chunks import OPTIMIZER, TensorChunk


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """Where a run stands, and what is said of it."""

    step: int
    position: dict[str, int]
    meta: dict[str, Any]

    def check(self) -> None:
        """Refuse what no manifest could hold, before anything is written."""
        try:
            json.dumps([self.position, self.meta])
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot save position and meta of step {self.step}: {error}. Give only what JSON can hold."
            ) from error


@dataclass(frozen=True, kw_only=True)
class Contents:
    """One checkpoint, as the worker that commits it sees it."""

    metadata: CheckpointMetadata
    plan: WritePlan
    tensors: Mapping[str, Tensor]
    """What goes into this worker's part: the training's own, or copies on the CPU."""
    extra_state: Mapping[str, Any]

    def manifest(self, files: Mapping[str, FileRecord], weights: str) -> Manifest:
        """Return the manifest of these files; `weights` is the fingerprint."""
        return Manifest(
            step=self.metadata.step,
            position=dict(self.metadata.position),
            meta=dict(self.metadata.meta),
            aliases=self.plan.aliases,
            tensors=self.plan.tensors,
            files=dict(files),
            weights_sha256=weights,
        )

    @property
    def is_whole(self) -> bool:
        """Whether this worker writes everything: servers, which hold everything, are not the first."""
        return len(self.plan.writers) == 1 and self.plan.tensors.keys() <= self.tensors.keys()

    @property
    def nbytes(self) -> int:
        """How many bytes this worker writes of tensors."""
        return sum(one.numel() * one.element_size() for one in self.tensors.values())

    def fingerprint(self, folder: Path) -> str:
        """Return the sha256 of the weights, whose parts are all written into a folder."""
        if self.is_whole:
            return self.fingerprint_in_memory()
        with StoredTensors(folder, self.manifest({}, "")) as parts:
            return weights_sha256(parts.model)

    def fingerprint_in_memory(self) -> str:
        """Return the same where this worker writes everything."""
        keys = {key: key for key in self.tensors} | self.plan.aliases
        return weights_sha256(
            {
                key.removeprefix(MODEL_PREFIX): self.tensors[target]
                for key, target in keys.items()
                if key.startswith(MODEL_PREFIX)
            }
        )


def written(chunks: Mapping[str, TensorChunk], keys: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the values of some chunks; what is no dense tensor is refused."""
    return {key: dense(chunks[key].values, key.partition("/")[2]) for key in keys}


def own_slots(extra_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer keeps for its parameters that is no tensor: in a pipeline each worker knows only its own."""
    slots = extra_state.get(OPTIMIZER, {}).get("state", {})
    return {name: one for name, one in slots.items() if one}


def with_slots(extra_state: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Add what others keep of that kind."""
    known = extra_state.get(OPTIMIZER, {})
    slots = {name: one for other in others for name, one in other.items()} | known.get("state", {})
    return {**extra_state, OPTIMIZER: {**known, "state": slots}}


def plain_extra_state(extra_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra state as a checkpoint can hold it."""
    return {key: plain(value, key) for key, value in extra_state.items()}

"""The last file of a checkpoint: what it holds, and what each of its files must be."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.durable import FileRecord
from paceline.errors import CheckpointError

FORMAT = 1
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.pt"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    position: dict[str, int]
    meta: dict[str, Any]
    aliases: dict[str, str]
    """Other names of tied weights, each with the name its tensor is stored under."""
    files: dict[str, FileRecord]

    def write(self, folder: Path) -> None:
        """Write the manifest and have the disk hold it."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "position": self.position,
            "meta": self.meta,
            "aliases": self.aliases,
            "files": {name: record._asdict() for name, record in self.files.items()},
        }
        try:
            # Once through JSON first: it turns keys into strings, and the digest must see what a reader sees.
            body = json.loads(json.dumps(body))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot save position and meta of step {self.step}: {error}. Give only what JSON can hold."
            ) from error
        with (folder / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(body | {"sha256": _digest(body)}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint; a CheckpointError holds the bare reason why it cannot serve."""
        try:
            body = json.loads((folder / MANIFEST).read_bytes())
        except FileNotFoundError as error:
            raise CheckpointError(f"{MANIFEST} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is not valid JSON") from error
        if not isinstance(body, dict) or body.pop("sha256", None) != _digest(body):
            raise CheckpointError(f"{MANIFEST}: sha256 differs")
        if body.get("format") != FORMAT:
            raise CheckpointError(
                f"{MANIFEST} has format {body.get('format')}, and this version reads {FORMAT}"
            )
        try:
            return cls(
                step=int(body["step"]),
                position=dict(body["position"]),
                meta=dict(body["meta"]),
                aliases=dict(body["aliases"]),
                files={name: FileRecord(**body["files"][name]) for name in (MODEL, OPTIMIZER)},
            )
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{MANIFEST} does not describe a checkpoint") from error


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

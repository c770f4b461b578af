"""The last file of a checkpoint: what it holds, in which parts, and what each of its files must be. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import documents
from paceline.checkpoint.file_record import FileRecord
from paceline.checkpoint.formats import FORMATS, WRITTEN
from paceline.checkpoint.stored import Stored
from paceline.checkpoint.terms import check_meta, check_position, check_tensors
from paceline.documents import check_weights_sha256, is_sha256
from paceline.errors import CheckpointError

EXTRA_STATE = "extra_state.pt"
MANIFEST = "manifest.json"
MODEL_PREFIX = "model/"
COMMITTED = r"step-(\d+)"
OWN_FILE = re.compile(
    "|".join(re.escape(one.part).replace(r"\{\}", r"\d+") for one in FORMATS.values())
    + r"|\.?part-\d+\.json|extra_state\.pt|manifest\.json"
)
"""The names of all files that a checkpoint consists of, or that are there while it is written."""


def committed(folder: Path) -> list[Path]:
    """Return the folders of all committed checkpoints, the oldest step first, whole or damaged."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read as a folder of checkpoints: {error.strerror}. Choose another folder."
        ) from error
    steps = sorted((int(found[1]), name) for name in names if (found := re.fullmatch(COMMITTED, name)))
    return [folder / name for _, name in steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    position: dict[str, int]
    meta: dict[str, Any]
    aliases: dict[str, str]
    """Other keys of tied weights, each with the key its tensor is stored under."""
    tensors: dict[str, Stored]
    files: dict[str, FileRecord]
    weights_sha256: str
    """Of the whole model, however it is sharded."""
    format: int = WRITTEN

    @property
    def parts(self) -> list[str]:
        """The files with tensors, in order."""
        return [name for name in self.files if name != EXTRA_STATE]

    @property
    def model(self) -> dict[str, Stored]:
        """The tensors of the model by name, tied ones under each of theirs."""
        everything = self.tensors | {alias: self.tensors[key] for alias, key in self.aliases.items()}
        return {
            key.removeprefix(MODEL_PREFIX): tensor
            for key, tensor in everything.items()
            if key.startswith(MODEL_PREFIX)
        }

    def write(self, folder: Path) -> None:
        """Write the manifest and have the disk hold it; none is written that no reader would take."""
        try:
            self.check()
        except documents.DocumentError as error:
            raise CheckpointError(f"cannot save step {self.step}: {error}.") from error
        body = {
            "format": self.format,
            "step": self.step,
            "position": self.position,
            "meta": self.meta,
            "weights_sha256": self.weights_sha256,
            "aliases": self.aliases,
            "files": {name: record._asdict() for name, record in self.files.items()},
            "tensors": {
                key: {"shape": tensor.shape, "dtype": tensor.dtype, "boxes": tensor.chunks}
                for key, tensor in self.tensors.items()
            },
        }
        # Once through JSON first: it turns keys into strings, and the digest must see what a reader sees.
        body = json.loads(json.dumps(body))
        with (folder / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(_lines(body | {"sha256": _digest(body)}))
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint; a CheckpointError holds the bare reason why it cannot serve."""
        try:
            body = documents.read_object(folder / MANIFEST)
        except FileNotFoundError as error:
            raise CheckpointError(f"{MANIFEST} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from error
        except documents.DocumentError as error:
            raise CheckpointError(f"{MANIFEST} {error}") from error
        if body.pop("sha256", None) != _digest(body):
            raise CheckpointError(f"{MANIFEST}: sha256 differs")
        if body.get("format") not in list(FORMATS):  # which compares what cannot be hashed, too
            known = ", ".join(map(str, FORMATS))
            raise CheckpointError(
                f"{MANIFEST} has format {body.get('format')}, and this version reads only {known}"
            )
        try:
            made = cls._parsed(body)
            made.check()
            made.check_phase()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = f" ({error})" if isinstance(error, documents.DocumentError) else ""
            raise CheckpointError(f"{MANIFEST} does not describe a checkpoint{reason}") from error
        named = re.fullmatch(r"step-([0-9]{1,18})", folder.name)
        if named is not None and int(named[1]) != made.step:
            raise CheckpointError(f"{MANIFEST} is of step {made.step}, not {named[1]}")
        return made

    def check(self) -> None:
        """Raise DocumentError where a field is not what one can be: of another type, out of range, the hash of nothing."""
        documents.check_fields(vars_of(self), Manifest)
        check_position(self.position, self.step)
        check_meta(self.meta)
        for name, record in self.files.items():
            if not documents.fits(record.size, int) or record.size < 0 or not is_sha256(record.sha256):
                raise documents.DocumentError(f"the record of {name} in files is no size and sha256")
        check_weights_sha256(self.weights_sha256)
        check_tensors(self.tensors, {place: self.files[name].size for place, name in enumerate(self.parts)})
        strange = next((alias for alias in self.aliases if not alias.startswith(MODEL_PREFIX)), None)
        if strange is not None:
            raise documents.DocumentError(f"aliases: {documents.shown(strange)} is no tensor of a model")
        lost = next((alias for alias, key in self.aliases.items() if key not in self.tensors), None)
        if lost is not None:
            raise documents.DocumentError(
                f"aliases: {documents.shown(lost)} is tied to a tensor that is not there"
            )

    def check_phase(self) -> None:
        """Raise DocumentError where a run of a Task stands in another call of `run.steps` than its only one."""
        # Nobody but a run of a Task says whether its data is a stream.
        if "stream" in self.meta and self.position.get("phase"):
            raise documents.DocumentError(
                f"position: phase is {self.position['phase']}, and a Task has one call of run.steps, 0"
            )

    @classmethod
    def _parsed(cls, body: dict[str, Any]) -> Manifest:
        made = cls(
            step=body["step"],
            position=body["position"],
            meta=dict(body["meta"]),
            aliases=dict(body["aliases"]),
            tensors={key: _stored(key, entry) for key, entry in body["tensors"].items()},
            files={name: FileRecord(**record) for name, record in body["files"].items()},
            weights_sha256=body["weights_sha256"],
            format=body["format"],
        )
        name = FORMATS[made.format].part
        # Nobody may be led outside of the folder by a name.
        if (
            made.parts != [name.format(number) for number in range(len(made.parts))]
            or EXTRA_STATE not in made.files
        ):
            raise documents.DocumentError("the files are not those of a checkpoint")
        return made


def newest_readable(place: Path, read: Callable[[Path], Manifest]) -> tuple[Path, Manifest, dict[Path, str]]:
    """Return the newest checkpoint of a run that `read` takes, and of each newer one why it does not."""
    passed_over: dict[Path, str] = {}
    for path in reversed(committed(place / "checkpoints" if (place / "checkpoints").is_dir() else place)):
        try:
            return path, read(path), passed_over
        except CheckpointError as error:
            passed_over[path] = str(error)
    damaged = "".join(f" {path.name}: {reason}." for path, reason in passed_over.items())
    raise CheckpointError(
        f"{place} holds no checkpoint that can be read.{damaged} "
        "Give the folder of a run that saved one, or of a checkpoint."
    )


def _stored(key: str, entry: Any) -> Stored:
    try:
        return Stored.parse(entry)
    except (LookupError, TypeError, ValueError) as error:
        raise documents.DocumentError(
            f"tensors: {documents.shown(key)} is no shape, dtype and boxes"
        ) from error


def vars_of(manifest: Manifest) -> dict[str, Any]:
    """Return the plain fields of a manifest by name."""
    return {
        name: getattr(manifest, name) for name in ("step", "position", "meta", "aliases", "weights_sha256")
    }


def _lines(body: Mapping[str, Any]) -> str:
    """Lay JSON out with a line for each entry: a tensor's is readable, and a search finds it."""
    entries = []
    for key, value in body.items():
        text = json.dumps(value)
        if key in ("files", "tensors") and value:
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items())
            text = f"{{\n{inner}\n }}"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

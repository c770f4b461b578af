"""`paceline inspect`: what a checkpoint holds, and whether it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.checkpoint.best import KEY as BEST
from paceline.checkpoint.best import best_path
from paceline.checkpoint.inspection import Inspection, verdict
from paceline.checkpoint.inspection import inspect as look
from paceline.cli.options import AsJson
from paceline.cli.outcome import print_json
from paceline.errors import CheckpointError

MOST = 10
"""Tensors that are shown unless all are asked for."""
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def inspect(
    folder: Annotated[Path, typer.Argument(help="A run folder, or one checkpoint in it.")],
    best: Annotated[
        bool, typer.Option("--best", help="Show the best checkpoint of a run, not the newest.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Show all tensors, not only the {MOST} largest.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare its sha256, not only its length.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Show what the newest checkpoint of a run holds: step, position, strategy, tensors, files, hashes; and its best ones."""
    found = look(best_path(folder) if best else folder, verify_all=verify)
    if json_:
        print_json(found.as_json(None if everything else MOST))
    else:
        for line in _lines(found, None if everything else MOST):
            print(line)  # noqa: T201
    damage = verdict(found)
    if damage is not None:
        raise CheckpointError(damage)


def _lines(found: Inspection, most: int | None) -> list[str]:
    manifest, meta = found.manifest, found.manifest.meta
    shown = found.tensors()[:most]
    model = manifest.model.values()
    values, size = sum(tensor.values for tensor in model), _size(sum(tensor.bytes for tensor in model))
    lines = [
        *(f"passed over {path}: {reason}" for path, reason in found.newer.items()),
        f"{found.path}: {', '.join(f'{key} {value}' for key, value in manifest.position.items())}",
        "  "
        + ", ".join(
            f"{key} {value}" for key, value in meta.items() if key != BEST and value not in (None, "")
        ),
        *(f"  best: {one.path.name}  {one.score}" for one in found.best),
        f"  model: {len(model)} tensors, {values:,} values, {size}, sha256 {manifest.weights_sha256[:16]}",
    ]
    for name, record in manifest.files.items():
        state = found.damage.get(name, "sha256 fits" if found.hashed else "of full length")
        lines.append(f"  {name:<20} {_size(record.size):>10}  sha256 {record.sha256[:16]}  {state}")
    width = max((len(key) for key, _ in shown), default=0)
    for key, tensor in shown:
        chunks = f"  in {len(tensor.chunks)} chunks" if len(tensor.chunks) > 1 else ""
        lines.append(
            f"  {key:<{width}} {tensor.dtype:>9} {_shape(tensor.shape):>14} {_size(tensor.bytes):>10}{chunks}"
        )
    if len(manifest.tensors) > len(shown):
        lines.append(f"  and {len(manifest.tensors) - len(shown)} smaller tensors (--all shows them)")
    for alias, key in manifest.aliases.items():
        lines.append(f"  {alias} is tied to {key}")
    return lines


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _size(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {_UNITS[-1]}"

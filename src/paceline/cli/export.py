"""`paceline export`: the weights of a run as safetensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import AsJson
from paceline.cli.outcome import print_json
from paceline.errors import InputError


def export(
    folder: Annotated[Path, typer.Argument(help="A run folder, or one checkpoint in it.")],
    target: Annotated[
        Path | None, typer.Option("--to", help="The file to write. Default: FOLDER/model.safetensors.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Write the run's best weights, not its newest.")
    ] = False,
    average: Annotated[
        bool | None,
        typer.Option(
            "--average/--no-average",
            help="Write the averages of the weights, or the weights themselves. Default: what the run evaluates.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there already.")
    ] = False,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Write several files of at most so much (2GB, say), and an index of them.",
        ),
    ] = None,
    hf: Annotated[
        bool,
        typer.Option(
            "--hf",
            help="Write a folder that transformers' from_pretrained loads. Default: FOLDER/pretrained.",
        ),
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="With --hf: a folder whose tokenizer goes with it.")
    ] = None,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="With --hf: adapters of peft's are added to the weights they adapt."),
    ] = False,
    json_: AsJson = False,
) -> None:
    """Write the newest weights of a run as one safetensors file, as a set of them with its index, or as a Hugging Face folder."""
    if hf:
        _export_hf(
            folder,
            target or folder / "pretrained",
            tokenizer,
            max_shard_size,
            merge=merge,
            best=best,
            average=average,
            overwrite=overwrite,
            json_=json_,
        )
        return
    if tokenizer is not None or merge:
        raise InputError(f"--{'merge' if merge else 'tokenizer'} goes with --hf. Add it, or leave this out.")
    from paceline.checkpoint import export as write

    made = write(
        folder,
        target or folder / "model.safetensors",
        best=best,
        average=average,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
    )
    if json_:
        skipped = [(str(path), reason) for path, reason in made.skipped]
        print_json(asdict(made) | {"path": str(made.path), "source": str(made.source), "skipped": skipped})
        return
    _print_skipped(made.skipped)
    print(  # noqa: T201
        f"{made.path}: {made.tensors} tensors of step {made.step}, {made.size:,} bytes"
        f"{f' in {len(made.files)} files' if made.files[1:] else ''}, sha256 {made.sha256[:16]}"
    )


def _export_hf(
    folder: Path,
    target: Path,
    tokenizer: Path | None,
    max_shard_size: str | None,
    *,
    merge: bool,
    best: bool,
    average: bool | None,
    overwrite: bool,
    json_: bool,
) -> None:
    """Write a folder for `from_pretrained`."""
    from paceline.hf.saving import write_pretrained

    if overwrite:
        raise InputError(
            "--overwrite does not go with --hf, which writes a folder of its own. Give another --to."
        )
    made = write_pretrained(
        folder,
        target,
        best=best,
        average=average,
        tokenizer=tokenizer,
        merge=merge,
        max_shard_size=max_shard_size or "5GB",
    )
    files = sorted(path.name for path in made.path.iterdir())
    if json_:
        skipped = [(str(path), reason) for path, reason in made.skipped.items()]
        print_json({"path": str(made.path), "files": files, "step": made.step, "skipped": skipped})
        return
    _print_skipped(made.skipped.items())
    print(f"{made.path}: {', '.join(files)} of step {made.step}")  # noqa: T201


def _print_skipped(skipped: Iterable[tuple[Path, str]]) -> None:
    for path, reason in skipped:
        print(f"passed over {path}: {reason}")  # noqa: T201

"""`paceline run`: start any script on several workers, as torchrun does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.folders import new_folder
from paceline.cli.outcome import report
from paceline.errors import InputError


def run(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT [ARGS]...", help="A Python file (or, with -m, a module) and its own arguments."
        ),
    ],
    workers: Annotated[
        int,
        typer.Option("-n", "--workers", "--nproc-per-node", "--nproc_per_node", help="How many processes."),
    ] = 1,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="Threads of each worker. Default: cores / workers.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where every rank's output goes. Default: runs/SCRIPT-TIME.")
    ] = None,
) -> int:
    """Start a script on several processes: any script that reads RANK, WORLD_SIZE and LOCAL_RANK."""
    from paceline.launch.base import LaunchSpec
    from paceline.launch.job import ScriptCall
    from paceline.launch.local import LocalLauncher

    if target.startswith("-"):
        raise InputError(
            f"paceline run has no option {target}. See paceline run --help; a script's own come behind its name."
        )
    if not module and not Path(target).is_file():
        raise InputError(f"there is no script {target}. With -m it would be taken for a module.")
    spec = LaunchSpec(
        call=ScriptCall(target=target if module else str(Path(target).resolve()), is_module=module),
        workers=workers,
        threads=threads,
        out=out or new_folder(target.replace(".", "-") if module else Path(target).stem),
        arguments=[target, *context.args],
        record={"script": target, "arguments": context.args, "workers": workers},
    )
    launcher = LocalLauncher()
    return report(launcher.launch(launcher.plan(spec)))

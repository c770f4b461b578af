"""`paceline collectives`: shows on a real run what every rank holds before and after each operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.cli.options import AsJson
from paceline.cli.outcome import print_json, report
from paceline.cli.starting import start_elsewhere
from paceline.errors import InputError
from paceline.training.options import BACKENDS, RunOptions
from paceline.world import env


def collectives(
    workers: Annotated[
        int, typer.Option("-n", "--workers", help="How many workers take part; at least 2.")
    ] = 4,
    only: Annotated[
        str | None,
        typer.Option(help="Show only these operations, with commas between: all_reduce,broadcast."),
    ] = None,
    backend: Annotated[
        str, typer.Option(help=f"What carries the tensors: {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}.")
    ] = "auto",
    json_: AsJson = False,
) -> int:
    """Show what every rank holds before and after each operation, from a real run."""
    from paceline.launch import api

    if workers < 2:
        raise InputError(f"--workers is {workers}, but it takes at least 2 to exchange something.")
    chosen = [name.strip() for name in only.split(",")] if only else None
    options = RunOptions(workers=workers, device="cpu", backend=backend, elastic=False)
    elsewhere = start_elsewhere(options)
    if elsewhere is not None:
        return elsewhere
    outcome = api.start("paceline.cli.tour:main", (chosen,), {}, options)
    status = report(outcome)
    identity = env.identity()
    if identity is not None and identity.rank > 0:
        return status
    if status == 0 and json_:
        print_json(outcome.results[0])
    elif status == 0:
        Console().print(render(outcome.results[0]))
    return status


def render(observations: Mapping[str, Any]) -> RenderableType:
    """Lay out what a tour saw: for each operation two sentences and one table."""
    head = Text.assemble(
        ("The collectives", "bold"),
        f": {observations['workers']} workers on {observations['device']}, over {observations['backend']}",
    )
    return Group(head, *(_operation(operation) for operation in observations["operations"]))


def _operation(operation: Mapping[str, Any]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("rank", justify="right", style="cyan", no_wrap=True)
    table.add_column("before", min_width=12)
    table.add_column("after", min_width=12, style="bold")
    for rank, (before, after) in enumerate(zip(operation["before"], operation["after"], strict=True)):
        table.add_row(str(rank), _held(before), _held(after))
    return Group(
        Text(""),
        Text(operation["name"], style="bold green"),
        Text(operation["sentence"]),
        Text.assemble(("In training: ", "dim"), operation["training"]),
        Padding(table, (1, 0, 0, 2)),
    )


def _held(value: Any) -> Text:
    """Return numbers as one line of text; a dash where there are none."""
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, str):
        return Text(value)
    return Text("  ".join(str(number) for number in value))

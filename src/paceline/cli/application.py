"""The command line application: every command under its name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.cli import (
    audit,
    cancel,
    chaos,
    collectives,
    doctor,
    export,
    inspect,
    new,
    predict,
    resize,
    rollouts,
    script,
    status,
    stop,
    submit,
    tasks,
    train,
    verify,
)
from paceline.cli.generated import GroupedCommand
from paceline.version import __version__

app = typer.Typer(
    help="Distributed PyTorch training whose answer does not depend on how many workers computed it.",
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
PASS_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
"""Everything after the script's name belongs to the script; options before it may have underscores, as torchrun's."""


def _show_version(value: bool) -> None:
    if value:
        print(__version__)  # noqa: T201
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    del version


app.command("train", cls=GroupedCommand)(train.train)
app.command("predict", cls=GroupedCommand)(predict.predict)
app.command("new")(new.new)
app.command("resize")(resize.resize)
app.command("stop")(stop.stop)
app.command("submit", cls=GroupedCommand)(submit.submit)
app.command("status")(status.status)
app.command("cancel")(cancel.cancel)
app.command("run", cls=GroupedCommand, context_settings=PASS_ON)(script.run)
app.command("verify", cls=GroupedCommand, context_settings={"allow_extra_args": True})(verify.verify)
app.command("audit")(audit.audit)
app.command("chaos")(chaos.chaos)
app.command("rollouts")(rollouts.rollouts)
app.command("tasks")(tasks.tasks)
app.command("inspect")(inspect.inspect)
app.command("export")(export.export)
app.command("collectives")(collectives.collectives)
app.command("doctor")(doctor.doctor)

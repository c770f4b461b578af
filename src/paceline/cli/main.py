"""The way in: starts what takes time, runs the command, turns errors into one line and an exit status."""

from __future__ import annotations

import sys
from typing import NoReturn

WORKING = ("train", "run", "collectives")
"""Commands that will need workers: their fork server starts loading torch while the arguments are read."""


def run() -> NoReturn:
    """Run the command line and exit with its status."""
    started_early = _start_early(sys.argv[1:])
    import typer

    from paceline.cli.application import app
    from paceline.errors import InputError

    try:
        status = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        status = 2
    except typer.Exit as request:
        status = request.exit_code
    except (typer.Abort, KeyboardInterrupt):
        status = 130
    except Exception as error:  # noqa: BLE001  (what is not about the arguments is raised again)
        status = _usage(error)
    finally:
        if started_early:
            from paceline.launch import forkserver

            forkserver.shared().close()
    sys.exit(status or 0)


def _start_early(arguments: list[str]) -> bool:
    if not arguments or arguments[0] not in WORKING or "--help" in arguments:
        return False
    from paceline.world import env

    if env.read("RANK") is not None:
        return False
    from paceline.launch import forkserver

    forkserver.shared()
    return True


def _usage(error: Exception) -> int:
    """Show what is wrong with the arguments as one line; anything else is ours and shown whole."""
    message = getattr(error, "format_message", None)
    if message is None:
        raise error
    context = getattr(error, "ctx", None)
    name = context.command_path if context is not None else "paceline"
    print(f"error: {message()} See {name} --help.", file=sys.stderr)  # noqa: T201
    return 2

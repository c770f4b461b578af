"""The way in: starts what takes time, runs the command, turns errors into one line and an exit status."""

from __future__ import annotations

import sys
from typing import NoReturn

WORKING = ("train", "run", "verify", "chaos", "collectives", "doctor", "rollouts")
"""Commands that will need workers: their fork server starts loading torch while the arguments are read."""


def run() -> NoReturn:
    """Run the command line and exit with its status."""
    from paceline.world import standard_streams

    standard_streams.fill()
    try:
        status = _command(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except OSError as error:
        status = _without_output(error)
    _leave(status)


def _without_output(error: OSError) -> int:
    """Print that standard output cannot be written, if that is what an error is about; return the exit status.

    To a reader who went away (`| head`) there is nothing to say.
    """
    import os

    try:
        os.write(sys.stdout.fileno(), b"\n")  # the exception does not say which file it is about
    except OSError:
        # What is left in the buffer must not fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(  # noqa: T201
                f"error: standard output cannot be written: {error.strerror}. "
                "The command is done; only what it had to say is lost.",
                file=sys.stderr,
            )
        return 1
    raise error


def _leave(status: int) -> NoReturn:
    """End this process; one that torchrun started is left without the interpreter's own clearing up.

    Threads of gloo may still run then, and now and then one of them took the whole process down with SIGABRT.
    """
    from paceline.world import env

    if status and "mpi4py.MPI" in sys.modules:
        from paceline.world.mpi import library

        library.abandon()  # MPI_Finalize would wait for ranks that wait for this one
    if env.read("RANK") is not None and "torch" in sys.modules:
        import os

        from paceline.compat.python import run_exit_functions

        sys.stdout.flush()
        sys.stderr.flush()
        run_exit_functions()
        os._exit(status)
    sys.exit(status)


def _command(arguments: list[str]) -> int:
    """Run one command and give its exit status."""
    from paceline.errors import PacelineError

    if arguments and arguments[0].replace("_", "-").startswith("--local-rank="):
        del arguments[0]  # torch.distributed.launch puts it before a script's own; LOCAL_RANK says the same
    early: PacelineError | None = None
    try:
        _start_early(arguments)
    except PacelineError as error:
        early = error
    import typer

    from paceline.cli.application import app
    from paceline.cli.refusal import refuse

    try:
        if early is not None:
            raise early
        _join_slurm(arguments)
        _join_mpi(arguments)
        return app(args=arguments or ["--help"], prog_name="paceline", standalone_mode=False) or 0
    except PacelineError as error:
        refuse(f"error: {error}")
        return error.exit_status
    except typer.Exit as request:
        return request.exit_code
    except typer.Abort:
        return 130
    except Exception as error:  # noqa: BLE001  (what is not about the arguments is raised again)
        return _usage(error)


def _start_early(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in WORKING or {"-h", "--help"} & set(arguments):
        return
    from paceline.world import env

    env.working_folder()  # torch's libraries do not load where it is gone, and say so in words of their own
    if env.read("RANK") is None and env.mpi_rank() is None and not _is_task(arguments):
        from paceline.launch.workers import fork_server as forkserver

        forkserver.shared()


def _join_mpi(arguments: list[str]) -> None:
    """Enter the world that mpirun has started this process in, before any option is read by it."""
    from paceline.world import env

    if env.mpi_rank() is not None and arguments and arguments[0] in WORKING and arguments[0] != "run":
        from paceline.launch.clusters import mpi

        mpi.enter()


def _is_task(arguments: list[str]) -> bool:
    """Return whether srun has started this process as one of several workers, and not of launchers that meet by themselves."""
    from itertools import pairwise

    from paceline.world import env

    meets = any(one.partition("=")[0] == "--rendezvous" for one in arguments)
    alone = "--on=local" in arguments or ("--on", "local") in pairwise(arguments)
    plain = env.slurm_task() is not None and not (meets or alone) and arguments[:1] != ["run"]
    return plain and not _meets_by_file(arguments)


def _meets_by_file(arguments: list[str]) -> bool:
    """Return whether a file of options says where launchers meet."""
    from itertools import pairwise
    from pathlib import Path

    words = [
        word for one in arguments for word in (one.split("=", 1) if one.startswith("--config=") else [one])
    ]
    named = [Path(path) for option, path in pairwise(words) if option == "--config"]
    if not named:
        return False
    from paceline.cli.config_file import read_config
    from paceline.errors import InputError

    try:
        return "rendezvous" in read_config(named[-1])
    except InputError:  # the command itself says what is wrong with the file
        return False


def _join_slurm(arguments: list[str]) -> None:
    """Enter the world that srun has started this process in, before any option is read by it."""
    if arguments and arguments[0] in WORKING and _is_task(arguments):
        from paceline.launch.clusters import slurm

        slurm.enter()


def _usage(error: Exception) -> int:
    """Show what is wrong with the arguments, or the folder, as one line; anything else is ours and shown whole."""
    from paceline.cli.refusal import refuse
    from paceline.errors import InputError
    from paceline.world import env

    message = getattr(error, "format_message", None)
    if message is None:
        try:
            env.working_folder()
        except InputError as deleted:
            refuse(f"error: {deleted}")
            return deleted.exit_status
        raise error
    context = getattr(error, "ctx", None)
    name = context.command_path if context is not None else "paceline"
    refuse(f"error: {message()} See {name} --help.")
    return 2

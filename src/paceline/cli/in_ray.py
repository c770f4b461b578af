"""Runs a command of paceline's for an actor of Ray's (`paceline.launch.clusters.ray`), and ends when that is gone.

The actor holds the other end of standard input; when it ends, however that comes about, this process gets SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    """Watch for the end of the actor, and do what the command line says."""
    lifeline = os.dup(0)  # workers must not hold it, nor read from it
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_wait, args=(lifeline,), daemon=True).start()
    from paceline.cli.main import run

    run()


def _wait(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.argv[0] = "paceline"
    main()

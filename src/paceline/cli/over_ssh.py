"""Runs a command of paceline's for a launcher on another machine: `paceline.launch.clusters.ssh` starts it over ssh.

The first line of standard input holds the run's secret, which is thus in no command line. Each later line is the number of a
signal, and the end of the input is the end of that launcher or of the connection to it: then this process gets SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from paceline.launch.clusters.ssh import HERE
from paceline.world import env


def main() -> None:
    """Take what the launcher says, and do what the command line says."""
    told = json.loads(_line(0))
    lifeline = os.dup(0)  # workers must not hold it, nor read from it
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    env.export({**told["variables"], env.SECRET: told["secret"]})
    print(HERE, flush=True)  # noqa: T201
    threading.Thread(target=_listen, args=(lifeline,), daemon=True).start()
    from paceline.cli.main import run

    run()


def _listen(lifeline: int) -> None:
    """Pass signals on to this process."""
    while line := _line(lifeline):
        os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)


def _line(descriptor: int) -> bytes:
    """Read to the end of a line, and no further; nothing at the end of the input."""
    found = b""
    while not found.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return b""
        found += byte
    return found


if __name__ == "__main__":
    sys.argv[0] = "paceline"
    main()

"""Runs a command of paceline's for a launcher elsewhere, which has started it over ssh or through an actor of Ray's.

`paceline.launch.clusters.relay` says what comes over standard input; at its end this process gets SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from paceline.launch.clusters.relay import HERE
from paceline.world import env


def main() -> None:
    """Take what the launcher says, and do what the command line says."""
    told = _variables(_line(0))
    if told is None:
        print(  # noqa: T201
            "error: this is started by paceline's own launcher, which says more on standard input. Use paceline train.",
            file=sys.stderr,
        )
        sys.exit(2)
    lifeline = os.dup(0)  # workers must not hold it, nor read from it
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    env.export(told)
    print(HERE.decode(), flush=True)  # noqa: T201
    threading.Thread(target=_listen, args=(lifeline,), daemon=True).start()
    from paceline.cli.main import run

    run()


def _variables(line: bytes) -> dict[str, str] | None:
    """Return what the first line says, None where it is no such line."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    plain = isinstance(found, dict) and all(isinstance(one, str) for one in found.values())
    return found if plain else None


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

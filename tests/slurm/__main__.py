"""`python -m tests.slurm COMMAND...`: start a SLURM of this machine, run a command in it, and take all of it away.

`--install` installs Debian's packages first (apt-get). Without a command there is a shell.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.slurm.cluster import cluster, install, missing


def main() -> int:
    """Run the command and return its status."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm", description=__doc__)
    parser.add_argument("--install", action="store_true", help="install slurm and munge with apt-get first")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run; a shell by default")
    given = parser.parse_args()
    if given.install:
        install()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    with cluster() as made:
        print(f"SLURM_CONF={made.configuration}", file=sys.stderr)
        command = given.command or [os.environ.get("SHELL", "/bin/sh")]
        return subprocess.run(command, env={**os.environ, **made.environment()}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

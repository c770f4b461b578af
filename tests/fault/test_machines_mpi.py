"""`mpirun` over two machines: the bits of one process, whether MPI or gloo carries the tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.machines import COMMAND, TASK
from tests.netns import Network, network
from tests.patience import HANG_S

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
MPIEXEC = Path(sys.executable).parent / "mpiexec"
pytestmark = pytest.mark.skipif(not MPIEXEC.exists(), reason="there is no mpiexec beside Python")


def way_to(net: Network, folder: Path) -> Path:
    """Write what mpiexec takes for ssh: a command that runs another one on the machine with an address."""
    cases = "\n".join(f"{one.address}) machine={one.name} ;;" for one in net.machines)
    script = folder / "to_machine"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = -x ] && shift\naddress=$1; shift\ncase $address in\n{cases}\nesac\n'
        'exec ip netns exec "$machine" sh -c "$*"\n'
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_two_machines_come_to_the_bits_of_one(backend: str, tmp_path: Path, bits: str) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "hurry").touch()
    with network(2) as net:
        hosts = ",".join(one.address for one in net.machines)
        started = [str(MPIEXEC), "-launcher", "ssh", "-launcher-exec", str(way_to(net, tmp_path))]
        how = ("--strategy", "ddp", "--shards", "4", "--backend", backend, "--out", "run")
        process = net.machines[0].run(
            [*started, "-hosts", hosts, "-ppn", "2", "-n", "4", *COMMAND, *how],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PACELINE_SECRET"},
        )
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, err
        assert json.loads(out.splitlines()[-1])["weights_sha256"] == bits

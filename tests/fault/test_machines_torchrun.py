"""`--on torchrun` on two machines: gloo finds the interface that reaches the first, and the bits are those of one process."""

import json
import os
import subprocess

from tests.fault.machines import COMMAND
from tests.patience import HANG_S


def test_two_machines_under_torchrun_come_to_the_bits_of_one(trial, bits):
    trial.hurry()
    first, _ = trial.net.machines
    where = ("--on", "torchrun", "--nodes", "2", "--rendezvous", f"{first.address}:29411")
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    started = [
        machine.run(
            [*COMMAND, *where, "--shards", "4", "--out", "run"],
            cwd=trial.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine in trial.net.machines
    ]
    ended = [process.communicate(timeout=HANG_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    told = json.loads(ended[0][0])
    assert (told["workers"], told["weights_sha256"], ended[1][0]) == (2, bits, "")

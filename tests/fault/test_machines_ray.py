"""A run on two Ray nodes, each a machine of its own: the second one comes late, joins, and dies."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.fault.machines import COMMAND
from tests.patience import HANG_S

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (the extra ray, which is large)"
)
PORT = 6379


def start_ray(machine, environment, *arguments):
    """Start a node of Ray's on a machine; what it leaves running there ends with the machine."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=2", "--disable-usage-stats"]
    command = [*ray, f"--node-ip-address={machine.address}", *arguments]
    assert machine.run(command, env=environment, stdout=subprocess.DEVNULL).wait(HANG_S) == 0


def test_a_node_that_comes_joins_and_one_that_dies_is_survived(trial, bits, ray_variables):
    first, second = trial.net.machines
    nodes = {**os.environ, **ray_variables}
    environment = {**nodes, "RAY_ADDRESS": f"{first.address}:{PORT}"}
    short_folder = ray_variables["RAY_TMPDIR"]
    start_ray(
        first, nodes, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={short_folder}"
    )
    trial.started += 1
    err = trial.folder / "err-1"
    options = (
        "--on ray --nodes 1:2 --workers 2 --shards 4 --max-restarts 0 --machine-timeout 4 --out run".split()
    )
    with err.open("w") as file:
        driver = first.run(
            [*COMMAND, *options],
            cwd=trial.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    trial.wait_until(lambda: trial.steps() > 1 or driver.poll() is not None)
    start_ray(second, nodes, f"--address={first.address}:{PORT}")
    trial.wait_until(lambda: trial.places() == [0, 0, 1, 1] or driver.poll() is not None)
    second.kill()
    trial.wait_until(lambda: len(trial.roster()) == 2 or driver.poll() is not None)
    lost = f"note: node {second.address} is lost; the others go on."
    trial.wait_until(lambda: lost in err.read_text() or driver.poll() is not None)
    trial.hurry()
    out, _ = driver.communicate(timeout=HANG_S)
    assert driver.returncode == 0, trial.told()
    result = json.loads(out.splitlines()[-1])
    assert result["weights_sha256"] == bits
    assert result["recoveries"]
    assert lost in err.read_text()

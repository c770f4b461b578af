"""Two machines, and what one process on one machine comes to."""

import json
import subprocess

import pytest

from tests.fault.machines import COMMAND, TASK, Trial
from tests.netns import network
from tests.patience import HANG_S


@pytest.fixture
def trial(tmp_path):
    with network(2) as net:
        yield Trial(tmp_path, net)


@pytest.fixture(scope="session")
def bits(tmp_path_factory):
    """What one process on one machine comes to."""
    folder = tmp_path_factory.mktemp("single")
    (folder / "task.py").write_text(TASK)
    (folder / "hurry").touch()
    command = [*COMMAND, "--strategy", "single", "--shards", "4", "--out", "run"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=HANG_S)
    return json.loads(done.stdout.splitlines()[-1])["weights_sha256"]

"""What may happen to the fork server and around it: none of it costs more than what it touches."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.dist.launch.processes import PACELINE, started
from tests.fault.test_launch_orphans import TASK

PIDS = Path("/sys/fs/cgroup/pids")
if not PIDS.is_dir():
    PIDS = Path("/sys/fs/cgroup")  # one hierarchy for all controllers


def read(path):
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("name", ["numpy", "queue", "types"])
def test_a_file_in_the_current_folder_is_not_taken_for_a_library(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\nraise ImportError('not the library')\n")
    command = (sys.executable, "-P", "-m", "paceline", "train", "digits", "--steps", "1", "--out", "run")
    with started(*command, folder=tmp_path) as train:
        status, _, err = train.end()
    assert (status, (tmp_path / "ran").exists()) == (0, False), err


FORKED = """
import multiprocessing, time
import paceline
from paceline.launch.workers import fork_server

def main(run):
    time.sleep(600)

if __name__ == "__main__":
    fork_server.shared()
    copy = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    copy.start()
    paceline.launch(main, workers=2, out="run")
"""


def test_workers_end_with_a_launcher_that_has_forked_a_copy_of_itself(tmp_path):
    (tmp_path / "forked.py").write_text(FORKED)
    with started(sys.executable, "forked.py", folder=tmp_path) as command:
        roster = tmp_path / "run" / "workers.json"
        command.wait_until(lambda: read(roster).count('"pid"') == 2)
        workers = {row["pid"] for row in json.loads(read(roster))}
        command.process.kill()
        command.wait_until(lambda: not workers & command.left().keys(), seconds=10)


@contextlib.contextmanager
def process_limit():
    """A control group whose number of processes can be limited; skips where none can be made."""
    group = PIDS / f"paceline-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not (group / "pids.max").exists():
            pytest.skip("this machine does not limit processes by control group")
        yield group
    finally:
        group.rmdir()


def test_a_fork_that_fails_costs_one_worker_for_a_while_and_the_others_train_on(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    train = (*PACELINE, "train", "task.py:Endless", "--workers", "2", "--steps", "300", "--out", "run")
    inside = (
        sys.executable,
        "-c",
        "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.argv[2], sys.argv[2:])",
    )
    events = tmp_path / "run" / "events.jsonl"
    with process_limit() as group:
        with started(
            *inside, str(group / "cgroup.procs"), *train, "--num-workers", "0", folder=tmp_path
        ) as run:
            run.wait_until(lambda: '"kind":"step"' in read(events))
            (group / "pids.max").write_text("1")
            os.kill(json.loads(read(tmp_path / "run" / "workers.json"))[1]["pid"], signal.SIGKILL)
            run.wait_until(lambda: '"kind":"regrouped"' in read(events))
            before = read(events).count('"kind":"step"')
            run.wait_until(lambda: read(events).count('"kind":"step"') > before + 5)
            (group / "pids.max").write_text("max")
            status, _, err = run.end()
        run.wait_until(lambda: not run.left())
    assert status == 0, err
    assert "Traceback" not in err
    assert err.count("a worker cannot be started") == 1
    assert read(events).count('"kind":"regrouped"') == 2  # one was lost, one has joined


MANY = 40
CROWD = f"""
import os, socket
from paceline.launch.workers.fork_server import ForkServer

def small(*kind, pair=socket.socketpair):
    ends = pair(*kind)
    for end in ends:  # the smallest that there is: it holds a few messages, as others hold some hundreds
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return ends

socket.socketpair = small

class End:
    def __reduce__(self): return os._exit, (0,)

server = ForkServer()
nowhere, (ours, theirs) = os.open(os.devnull, os.O_RDWR), socket.socketpair()
tickets = {{server.request(End(), [nowhere, nowhere, theirs.fileno()]) for _ in range({MANY})}}
started, ended = set(), 0
while ended < {MANY}:
    report = server.report()
    started |= {{report["started"]}} if "started" in report else set()
    ended += "ended" in report
assert started == tickets
server.close()
print("all of them")
"""


def test_a_launcher_may_ask_for_more_workers_than_a_socket_holds(tmp_path):
    (tmp_path / "crowd.py").write_text(CROWD)
    with started(sys.executable, "crowd.py", folder=tmp_path) as command:
        assert command.end() == (0, "all of them\n", "")

"""The guard against leaks sees each kind of leak, names it, and lets clean tests pass."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leaks

ROOT = Path(__file__).parents[2]
LEAKY = """
import os, subprocess, sys, threading, time
from multiprocessing.shared_memory import SharedMemory
import pytest

KEPT = []

def test_clean(tmp_path):
    (tmp_path / "file").write_text("x")
    os.environ["PYTEST_OWN"] = "1"

def test_process():
    KEPT.append(subprocess.Popen(["sleep", "77"]))

def test_grandchild():
    subprocess.run(["sh", "-c", "sleep 78 & exit"], check=True)

def test_forked_by_a_server():
    code = "__import__('time').sleep(1 if __import__('os').fork() else print(flush=True) or 79)"
    server = [sys.executable, "-c", code, "paceline.launch.workers.fork_server_process"]
    KEPT.append(subprocess.Popen(server, stdout=subprocess.PIPE))
    KEPT[-1].stdout.readline()

def test_thread():
    threading.Thread(target=time.sleep, args=(6,), name="forgotten", daemon=True).start()

def test_open_file(tmp_path):
    KEPT.append((tmp_path / "open").open("w"))

def test_variable():
    os.environ["LEAKED_NAME"] = "1"

def test_directory(tmp_path):
    os.chdir(tmp_path)

def test_shared_memory():
    KEPT.append(SharedMemory(create=True, size=16, name="paceline-leak-PID"))

def test_nothing_is_left_of_the_others():
    assert "LEAKED_NAME" not in os.environ
    KEPT[-1].close()
    KEPT[-1].unlink()
"""


def test_each_kind_of_leak_fails_its_test_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\nleaks.GRACE_S = 0.3\n")
    (tmp_path / "test_leaky.py").write_text(LEAKY.replace("PID", str(os.getpid())))
    options = ["-p", "no:cacheprovider", "-rEf", "--tb=line", "-W", "ignore", "--rootdir", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path / "test_leaky.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="500"),
    )
    said = dict(
        re.findall(
            r"^ERROR \S+::(\w+) - (?:Failed: )?the test leaves behind: (.*)$", done.stdout, re.MULTILINE
        )
    )
    expected = {
        "test_process": "process",
        "test_grandchild": "sleep 78",
        "test_forked_by_a_server": "paceline.launch.workers.fork_server_process",
        "test_thread": "thread 'forgotten' still runs",
        "test_open_file": "/open is still open",
        "test_variable": "environment variable LEAKED_NAME was None and is '1'",
        "test_directory": "the current directory was",
        "test_shared_memory": f"/paceline-leak-{os.getpid()} is left",
    }
    assert said.keys() == expected.keys(), done.stdout + done.stderr
    for name, words in expected.items():
        assert words in said[name]
        assert ";" not in said[name], "one leak was named as several"
    assert "10 passed, 8 errors" in done.stdout


@pytest.fixture
def before() -> leaks.Before:
    return leaks.look()


def test_clean_is_silent_and_quick(before: leaks.Before, tmp_path: Path) -> None:
    started = time.monotonic()
    assert leaks.find(before, tmp_path) == []
    assert time.monotonic() - started < leaks.GRACE_S, "nothing was left, and yet the grace was waited out"


def test_what_is_about_to_end_gets_its_time(before: leaks.Before) -> None:
    ending = threading.Thread(target=time.sleep, args=(0.2,))
    ending.start()
    with subprocess.Popen(["/bin/sleep", "0.2"]):
        assert leaks.left_processes(before)
        assert leaks.left_threads(before)
        assert leaks.find(before, None) == []


def test_a_process_that_ended_is_no_leak_before_it_is_waited_for(before: leaks.Before) -> None:
    with subprocess.Popen(["/bin/sleep", "0"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process.pid in leaks.descendants(os.getpid())
        assert leaks.left_processes(before) == []


def test_what_runs_beside_the_test_is_not_its_own() -> None:
    """A page's command that ran for longer than the grace was killed by the guard of another test."""
    start, end = threading.Event(), threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    def run() -> None:
        start.wait()
        started.append(subprocess.Popen(["/bin/sleep", "60"]))
        end.wait()

    older = threading.Thread(target=run)
    older.start()
    try:
        before = leaks.look()
        start.set()
        while not started:
            time.sleep(0.01)
        assert started[0].pid in leaks.descendants(os.getpid())
        assert leaks.left_processes(before) == []
        leaks.restore(before)
        assert started[0].poll() is None
        end.set()
        older.join()
        assert len(leaks.left_processes(before)) == 1, "nobody is left who would end it"
    finally:
        start.set()
        end.set()
        older.join()
        started[0].kill()
        started[0].wait()


def test_commands_of_pages_are_not_the_tests_own_and_their_orphans_are(before: leaks.Before) -> None:
    below = "import subprocess; print(subprocess.Popen(['/bin/sleep', '60']).pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", below, leaks.BESIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as page:
        assert page.stdout is not None
        command = int(page.stdout.readline())
        assert command in leaks.descendants(os.getpid())
        assert leaks.left_processes(before) == []
        page.kill()
        page.wait()
    assert leaks.new_processes(before) == [command]
    os.kill(command, 9)
    os.waitpid(command, 0)


@pytest.fixture
def server_with_worker() -> Iterator[tuple[int, multiprocessing.process.BaseProcess]]:
    context = multiprocessing.get_context("forkserver")
    worker = context.Process(target=time.sleep, args=(60,))
    worker.start()
    yield int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1]), worker
    worker.kill()
    worker.join()
    worker.close()


def test_the_fork_server_may_stay_and_its_workers_may_not(
    server_with_worker: tuple[int, multiprocessing.process.BaseProcess],
) -> None:
    server, worker = server_with_worker
    assert worker.pid is not None
    assert {server, worker.pid} <= set(leaks.descendants(os.getpid()))
    assert "multiprocessing.forkserver" in leaks.command(server)
    assert not leaks.is_leak(server)
    assert leaks.is_leak(worker.pid)


def test_shared_memory_is_ours_unless_strangers_use_it(before: leaks.Before) -> None:
    path = leaks.SHARED_MEMORY / f"paceline-test-{os.getpid()}"
    path.write_text("x")
    try:
        with path.open() as file, subprocess.Popen(["/bin/sleep", "60"], stdin=file) as child:
            assert leaks.left_shared_memory(before) == [f"{path} is left"], "our own use does not excuse us"
            assert leaks.is_used_by_strangers(str(path), {os.getpid()}), "a process we do not know holds it"
            child.kill()
    finally:
        path.unlink()

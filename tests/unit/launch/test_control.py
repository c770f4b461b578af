"""Orders to a run in progress: whoever asks badly, or goes away, harms nothing."""

import contextlib
import json
import os
import resource
import select
import socket
import threading
import time
from pathlib import Path

import pytest

from paceline.errors import InputError
from paceline.launch.accepting import PAUSE_S
from paceline.launch.control import NAME, ControlSocket, in_progress, order
from paceline.world import env
from tests.patience import HANG_S


@pytest.fixture
def control(tmp_path):
    """A socket that takes orders, and the folder that names it."""
    made = ControlSocket(tmp_path, lambda request: f"{request['workers']} workers")
    yield made
    made.close()
    assert not (tmp_path / NAME).exists()


def test_the_socket_of_a_launcher_that_was_killed_goes_when_the_next_begins(tmp_path):
    killed = os.fork()
    if not killed:
        ControlSocket(tmp_path, str)
        os._exit(0)
    os.waitpid(killed, 0)
    left = Path(json.loads((tmp_path / NAME).read_text())["socket"])
    assert left.exists()
    other = tmp_path / "other"
    other.mkdir()
    ControlSocket(other, str).close()
    assert not left.parent.exists()


def connect(folder):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.connect(json.loads((folder / NAME).read_text())["socket"])
    return made


def test_an_order_is_answered(control, tmp_path):
    control.serve()  # nobody is there yet, or any more

    def serve():
        select.select([control], [], [])
        control.serve()

    server = threading.Thread(target=serve)
    server.start()
    assert order(tmp_path, {"do": "resize", "workers": 3}) == "3 workers"
    server.join()


@contextlib.contextmanager
def files_left(count):
    """Have this process open so many more files and no others."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1 + count, limits[1]))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in held:
            os.close(one)


def test_whoever_finds_no_more_files_open_is_turned_away_and_the_next_is_served(control, tmp_path):
    with connect(tmp_path) as first:
        with files_left(0):
            control.serve()
        assert first.recv(100) == b""
    with connect(tmp_path) as second:
        second.sendall(b'{"workers": 2}')
        control.serve()
        assert b"2 workers" in second.recv(100)


def test_whoever_can_be_neither_taken_nor_turned_away_is_so_later(control, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connect(tmp_path) as first, connect(tmp_path) as second:
        first.sendall(b'{"workers": 2}')
        begun = time.monotonic()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            control.serve()  # the spare descriptor is given up, and nothing comes of it
            control.serve()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert time.monotonic() - begun >= PAUSE_S  # else the loop would spin
        control.serve()
        assert b"2 workers" in first.recv(100)
        second.settimeout(HANG_S)
        with files_left(0):
            control.serve()
        assert second.recv(100) == b""


def test_a_socket_that_cannot_be_made_leaves_nothing_open(tmp_path):
    def opened():
        return sorted(Path("/proc/self/fd").iterdir())

    before, failed = opened(), 0
    for count in range(20):
        with files_left(count):
            try:
                ControlSocket(tmp_path, str).close()
                break
            except (OSError, InputError):
                failed += 1
        assert opened() == before
    assert 2 < failed < 20


@pytest.mark.parametrize("sent", [b"", b"nonsense", b"[1, 2]", b"{}", b'{"workers": {}}'])
def test_a_bad_order_gets_an_answer_and_one_who_is_gone_none(sent, control, tmp_path):
    with connect(tmp_path) as asking:
        if sent:
            asking.sendall(sent)
        else:
            asking.close()
        control.serve()
    with connect(tmp_path) as asking:
        asking.sendall(sent or b"{")
        control.serve()
        reply = json.loads(asking.makefile().readline())
    assert reply["ok"] is (sent == b'{"workers": {}}')


def test_an_order_nested_beyond_measure_gets_an_answer(control, tmp_path):
    with connect(tmp_path) as asking:
        asking.sendall(b"[" * 4000)
        control.serve()
        assert not json.loads(asking.makefile().readline())["ok"]


@pytest.mark.parametrize("there", [None, "", "[]", '{"socket": "/nowhere"}'])
def test_no_run_under_way_is_one_line(there, tmp_path):
    if there is not None:
        (tmp_path / NAME).write_text(there)
    with pytest.raises(InputError, match=r"no run is in progress|does not answer"):
        order(tmp_path, {"do": "resize", "workers": 3})


@pytest.mark.parametrize(
    "there",
    [
        {},
        {"pid": os.getpid()},
        {"pid": 0, "host": env.host()},
        {"pid": -1, "host": env.host()},
        {"pid": True, "host": env.host()},
        {"pid": os.getpid(), "host": "\x1b[2Ja\nb"},
        {"pid": os.getpid(), "host": env.host(), "started_by": ["x"]},
    ],
    ids=range(7),
)
def test_what_no_launcher_has_written_is_no_run_in_progress(there, tmp_path):
    (tmp_path / NAME).write_text(json.dumps(there))
    assert in_progress(tmp_path) is None


@pytest.mark.parametrize("reply", [b"", b"[]", b"{}", b'{"ok": false}', b"[" * 50_000])
def test_an_answer_that_is_none_is_one_line(reply, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()

        def answer():
            asking, _ = listening.accept()
            with asking:
                asking.recv(4096)
                asking.sendall(reply + b"\n")

        server = threading.Thread(target=answer)
        server.start()
        said = {"pid": os.getpid(), "host": env.host(), "socket": str(tmp_path / "s")}
        (tmp_path / NAME).write_text(json.dumps(said))
        with pytest.raises(InputError, match="does not answer"):
            order(tmp_path, {"do": "stop"})
        server.join()

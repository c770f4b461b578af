"""The control connection between launchers: real sockets on the loopback interface."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from paceline.transport.control import CLOSED, ControlClient, ControlServer, Gone, Refused, Said
from paceline.transport.secret import Secret

CLIENT = """
import sys, time
from paceline.transport.control import ControlClient
from paceline.transport.secret import Secret
client = ControlClient("127.0.0.1", int(sys.argv[1]), Secret(sys.argv[2]), silence_s=float(sys.argv[3]), join_s=10)
client.send({"hello": 1})
time.sleep(60)
"""


def heard(end, kind, within=10.0):
    """Return the next event of a kind, and drop those before it."""
    deadline = time.monotonic() + within
    waiting = vars(end).setdefault("unheard", [])
    while time.monotonic() < deadline:
        while waiting:
            if isinstance(event := waiting.pop(0), kind):
                return event
        select.select([end], [], [], 0.1)
        waiting += end.events()
    raise AssertionError(f"no {kind.__name__} within {within} s")


@pytest.fixture
def secret():
    return Secret.make()


@pytest.fixture
def server(secret):
    made = ControlServer("127.0.0.1", 0, secret, silence_s=5.0)
    yield made
    made.close()


@pytest.fixture
def connect(server, secret):
    made = []

    def one(secret=secret, port=None, **options):
        options = {"silence_s": 5.0, "join_s": 5.0} | options
        made.append(ControlClient("127.0.0.1", port or server.port, secret, **options))
        return made[-1]

    yield one
    for client in made:
        client.close()  # which may be the second time


@pytest.fixture
def process(server, secret):
    started = []

    def one(silence_s):
        code = [sys.executable, "-c", CLIENT, str(server.port), secret.text, str(silence_s)]
        started.append(subprocess.Popen(code))
        return started[-1]

    yield one
    for child in started:
        child.kill()
        child.wait()


def test_messages_go_both_ways_in_their_order(server, connect):
    client = connect()
    for number in range(100):
        client.send({"number": number})
    peer = heard(server, Said).peer
    server.send(peer, {"answer": "é" * 100_000})
    assert heard(client, Said).message == {"answer": "é" * 100_000}


def test_the_last_words_of_a_client_that_closes_are_heard_before_its_end(server, connect):
    client = connect()
    client.send({"hello": 1})
    heard(server, Said)
    client.send({"last": 1})
    client.close()
    assert heard(server, Said).message == {"last": 1}
    assert "closed" in heard(server, Gone).reason


def test_the_server_closes(server, connect):
    client = connect()
    client.send({"hello": 1})
    server.send(heard(server, Said).peer, {"do": "end"})
    assert heard(client, Said).message == {"do": "end"}
    server.close()
    assert "closed" in heard(client, Gone).reason


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_is_killed_or_stopped_is_noticed(server, process, number, request):
    if number == signal.SIGSTOP:
        silence_s, server = 1.0, request.getfixturevalue("quick_server")
    else:
        silence_s = 30.0
    child = process(silence_s)
    heard(server, Said)
    began = time.monotonic()
    os.kill(child.pid, number)
    heard(server, Gone)
    assert time.monotonic() - began < (4.0 if number == signal.SIGSTOP else 2.0)


@pytest.fixture
def quick_server(secret, server):
    """Listen on the same port of the test's own, with little patience."""
    port = server.port
    server.close()
    made = ControlServer("127.0.0.1", port, secret, silence_s=1.0)
    yield made
    made.close()


def test_who_has_another_secret_is_told_and_counted(server, connect):
    stranger = connect(Secret.make())
    stranger.send({"do": "stop"})
    assert "secret" in heard(stranger, Gone).reason
    assert heard(server, Refused).count >= 1
    friend = connect()
    friend.send({"hello": 1})
    assert heard(server, Said).message == {"hello": 1}


def test_garbage_and_idle_connections_disturb_nobody(server, connect):
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    try:
        for number, one in enumerate(idle[:25]):
            one.sendall(os.urandom(200) if number % 2 else b"\xff" + bytes(8) + b"\x7f")
        client = connect()
        client.send({"hello": 1})
        assert heard(server, Said).message == {"hello": 1}
        deadline = time.monotonic() + 15
        for one in idle:  # all are dropped in the end, the silent ones too
            one.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                while one.recv(1024):
                    pass
            except ConnectionResetError:
                pass
    finally:
        for one in idle:
            one.close()


def test_nobody_listens(connect):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = connect(port=taken.getsockname()[1], join_s=0.5)
        assert "nobody answers" in heard(client, Gone).reason


def test_a_leader_that_comes_later_is_found(secret, connect):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    client = connect(port=port, join_s=10)
    client.send({"hello": 1})
    time.sleep(0.5)
    late = ControlServer("127.0.0.1", port, secret, silence_s=5.0)
    try:
        assert heard(late, Said).message == {"hello": 1}
    finally:
        late.close()


def test_a_port_that_is_taken(server, secret):
    with pytest.raises(OSError, match="in use"):
        ControlServer("127.0.0.1", server.port, secret, silence_s=5.0)


def test_what_is_no_object_says_nothing(server, connect):
    client = connect()
    client._outgoing.put(b"[1, 2")
    client._ring()
    assert heard(server, Said).message == {}


@pytest.fixture
def proxy():
    """Take connections and close them, or say something of its own first: a proxy without a leader behind it, another program."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(0.05)
    ended, says = threading.Event(), []

    def serve():
        while not ended.is_set():
            with contextlib.suppress(OSError), listening.accept()[0] as one:
                one.sendall(b"".join(says))

    thread = threading.Thread(target=serve)
    thread.start()
    yield listening.getsockname()[1], says
    ended.set()
    thread.join()
    listening.close()


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + b" " * 100])
def test_what_takes_connections_and_is_no_leader_is_called_again_until_the_time_is_up(connect, proxy, words):
    port, says = proxy
    says.append(words)
    began = time.monotonic()
    client = connect(port=port, join_s=1.5)
    assert "does not speak as a leader does" in heard(client, Gone).reason
    assert time.monotonic() - began >= 1.5


def test_the_last_words_of_a_leader_that_closes_are_heard_before_its_end(secret):
    """libzmq drops what came in on a connection that is not to be made again; it did so once in ten times."""
    for number in range(60):
        server = ControlServer("127.0.0.1", 0, secret, silence_s=5.0)
        client = ControlClient("127.0.0.1", server.port, secret, silence_s=5.0, join_s=10.0)
        try:
            client.send({"hello": number})
            peer = heard(server, Said).peer
            for part in range(20):
                server.send(peer, {"part": part})
            server.close()
            said = [heard(client, Said).message for _ in range(20)]
            assert said == [{"part": part} for part in range(20)]
            assert heard(client, Gone).reason == CLOSED
        finally:
            client.close()
            server.close()

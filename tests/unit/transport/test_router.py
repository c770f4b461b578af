"""The end that many connect to: one message, or one peer, costs at most itself."""

import contextlib
import queue
import threading
import time

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.transport import router as module
from paceline.transport.router import Handlers, Router
from tests.patience import HANG_S


class Owner:
    """Keeps what a router hears; raises at "bad", and waits at "wait" until it may go on."""

    def __init__(self):
        self.heard, self.gone = queue.SimpleQueue(), queue.SimpleQueue()
        self.waits, self.may_go_on = threading.Event(), threading.Event()

    def take(self, peer, frames):
        if frames == [b"wait"]:
            self.waits.set()
            assert self.may_go_on.wait(HANG_S)
        if frames == [b"bad"]:
            raise ValueError("what cannot be read")
        self.heard.put((peer, *frames))

    def lose(self, peer, reason):
        self.gone.put((peer, reason))


@pytest.fixture
def owner():
    return Owner()


@pytest.fixture
def router(owner, tmp_path):
    made = Router(f"ipc://{tmp_path}/router", Handlers(message=owner.take, gone=owner.lose))
    yield made
    owner.may_go_on.set()
    made.close()


@contextlib.contextmanager
def connected(router, **options):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.reconnect_ivl, socket.rcvtimeo = 0, 3_600_000, int(1000 * HANG_S)
    for name, value in options.items():
        setattr(socket, name, value)
    monitor = socket.get_monitor_socket(zmq.Event.DISCONNECTED)
    monitor.rcvtimeo = int(1000 * HANG_S)
    socket.connect(router.address)
    try:
        yield socket, monitor
    finally:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)
        context.term()


def test_a_message_that_raises_costs_that_message_alone(router, owner, capfd):
    with connected(router) as (socket, _), contextlib.ExitStack() as soon:
        leaving, _ = soon.enter_context(connected(router))
        leaving.send(b"here")
        gone = owner.heard.get(timeout=HANG_S)[0]
        socket.send(b"wait")
        assert owner.waits.wait(HANG_S)
        for word in (b"bad", b"good"):
            socket.send(word)
        soon.close()
        owner.may_go_on.set()
        assert [owner.heard.get(timeout=HANG_S)[1] for _ in range(2)] == [b"wait", b"good"]
        assert owner.gone.get(timeout=HANG_S)[0] == gone
    assert capfd.readouterr().err == ("paceline: a message was dropped: ValueError: what cannot be read\n")


def test_what_cannot_be_sent_keeps_nothing_else_from_being_sent_nor_the_end(router, owner, capfd):
    with connected(router) as (socket, _):
        socket.send(b"wait")
        assert owner.waits.wait(HANG_S)
        owner.may_go_on.set()
        peer = owner.heard.get(timeout=HANG_S)[0]
        owner.waits.clear()
        owner.may_go_on.clear()
        socket.send(b"wait")
        assert owner.waits.wait(HANG_S)
        for frames in (["no bytes"], [b"bytes"], ["no bytes"]):
            router.send(peer, frames)
        closing = threading.Thread(target=router.close)
        closing.start()
        owner.may_go_on.set()
        assert socket.recv() == b"bytes"
        closing.join(HANG_S)
        assert not closing.is_alive()
    assert capfd.readouterr().err.count("paceline: a message was dropped: TypeError") == 2


def test_a_peer_that_takes_nothing_is_disconnected(owner, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_WAITING", 50)
    router = Router(f"ipc://{tmp_path}/router", Handlers(message=owner.take, gone=owner.lose))
    try:
        with connected(router, rcvhwm=1) as (socket, monitor), connected(router) as (other, _):
            socket.send(b"hello")
            peer = owner.heard.get(timeout=HANG_S)[0]
            while owner.gone.empty():
                router.send(peer, [bytes(100_000)])
            assert owner.gone.get() == (peer, "takes nothing of what is sent to it")
            with contextlib.suppress(zmq.Again):
                socket.send(b"still here", zmq.NOBLOCK)
            while not monitor.poll(10):  # it learns of that once it takes what was sent
                with contextlib.suppress(zmq.Again):
                    socket.recv(zmq.NOBLOCK)
            assert recv_monitor_message(monitor)["event"] == zmq.Event.DISCONNECTED
            other.send(b"others go on")
            assert owner.heard.get(timeout=HANG_S)[1] == b"others go on"
            assert owner.gone.empty()
    finally:
        router.close()


def test_what_a_peer_said_before_it_was_given_up_is_passed_over_when_its_end_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_WAITING", 50)
    heard, gone = queue.SimpleQueue(), queue.SimpleQueue()
    peers, steps = {}, {name: threading.Event() for name in ("begun", "spoken", "given up", "ended")}

    def take(peer, frames):
        heard.put(frames)
        peers[frames[0]] = peer
        if frames == [b"give it up"]:
            steps["begun"].set()
            assert steps["spoken"].wait(HANG_S)
            while gone.empty():
                router.send(peers[b"hello"], [bytes(100_000)])
            steps["given up"].set()
            assert steps["ended"].wait(HANG_S)

    handlers = Handlers(message=take, gone=lambda peer, reason: gone.put((peer, reason)))
    router = Router(f"ipc://{tmp_path}/router", handlers)
    try:
        with connected(router, rcvhwm=1) as (socket, monitor), connected(router) as (other, _):
            socket.send(b"hello")
            assert heard.get(timeout=HANG_S) == [b"hello"]
            other.send(b"give it up")
            assert steps["begun"].wait(HANG_S)
            socket.send(b"still here")
            time.sleep(0.1)  # until it lies where the router takes it from
            steps["spoken"].set()
            assert steps["given up"].wait(HANG_S)
            while not monitor.poll(10):
                with contextlib.suppress(zmq.Again):
                    socket.recv(zmq.NOBLOCK)
            time.sleep(0.1)  # until the router's end has said so, too
            steps["ended"].set()
            assert heard.get(timeout=HANG_S) == [b"give it up"]
            other.send(b"others go on")
            assert heard.get(timeout=HANG_S) == [b"others go on"]
            assert gone.get(timeout=HANG_S) == (peers[b"hello"], "takes nothing of what is sent to it")
            assert gone.empty()
    finally:
        for step in steps.values():
            step.set()
        router.close()

"""The end that many connect to: what one message does to its owner costs no other message."""

import threading

import zmq

from paceline.transport.router import Handlers, Router
from tests.patience import HANG_S


def test_a_message_that_raises_costs_no_other_that_came_with_it(tmp_path, capfd):
    got, held, done = [], threading.Event(), threading.Event()

    def take(_peer, frames):
        word = frames[0]
        if word == b"hold":
            held.wait(HANG_S)
        if word == b"bad":
            raise ValueError("this one cannot be read")
        got.append(word)
        if word == b"last":
            done.set()

    router = Router(f"ipc://{tmp_path}/router", Handlers(take, lambda *_: None))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(router.address)
        dealer.send(b"hold")  # so that all others are read at once
        for word in (b"bad", b"second", b"bad", b"last"):
            dealer.send(word)
        threading.Timer(0.2, held.set).start()
        assert done.wait(HANG_S)
    router.close()
    assert got == [b"hold", b"second", b"last"]
    assert capfd.readouterr().err.count("a message was dropped: ValueError: this one cannot be read") == 2

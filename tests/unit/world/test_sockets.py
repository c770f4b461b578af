"""Which sockets are a group's own."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from torch.distributed import HashStore, ProcessGroupGloo

from paceline.world.sockets import Sockets


def group(store: HashStore, rank: int, made: dict[int, ProcessGroupGloo]) -> None:
    made[rank] = ProcessGroupGloo(store, rank, 2)


def test_sockets_of_others_that_are_opened_meanwhile_stay_open() -> None:
    store, made = HashStore(), {}
    sockets = Sockets()
    with sockets.opened_here():
        other = threading.Thread(target=group, args=(store, 1, made))
        other.start()
        group(store, 0, made)
        other.join()
        here, there = socket.socketpair()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            calling = socket.create_connection(listening.getsockname())
            called, _ = listening.accept()
    sockets.shut()
    with here, there, calling, called:
        for sender, receiver in ((here, there), (calling, called), (called, calling)):
            sender.sendall(b"still here")
            assert receiver.recv(20) == b"still here"
    assert sockets._held  # gloo's own were found


def test_looking_for_them_leaves_nothing_open() -> None:
    for _ in range(3):
        made: dict[int, ProcessGroupGloo] = {}
        store, sockets = HashStore(), Sockets()
        with sockets.opened_here():
            other = threading.Thread(target=group, args=(store, 1, made))
            other.start()
            group(store, 0, made)
            other.join()
        before = {one.name for one in Path("/proc/self/fd").iterdir()}
        sockets.shut()
        assert {
            one.name for one in Path("/proc/self/fd").iterdir()
        } <= before  # gloo may have closed some already
        made.clear()

"""Messages between processes: they arrive whole and in order, and nobody without the secret gets a word in."""

import os
import socket
import stat
import struct
import threading
import time
from pathlib import Path

import pytest
import zmq
from zmq.utils import garbage

from paceline.transport.mailbox import Entry, Mailbox
from paceline.transport.sealing import HEADER_BYTES, Seal, SealError, header
from tests.patience import HANG_S

SECRET = b"a secret"
LARGE = memoryview(os.urandom(300_000))


class End:
    """A mailbox, what it got, and whom it lost."""

    def __init__(self, host=None, secret=SECRET):
        self.mailbox = Mailbox(secret)
        local, far = self.mailbox.bind(None, host)
        self.entry = Entry(self.mailbox.boot, far or local)
        self.near = Entry(self.mailbox.boot, local)
        self.got, self.lost = [], []
        self.changed = threading.Condition()

    def start(self, **others):
        self.mailbox.start({name: one.entry for name, one in others.items()}, self.take, self.lose)

    def take(self, sender, content, frames):
        read = [bytes(one.content()) for one in frames]
        assert [len(one) for one in read] == [one.size for one in frames]
        with self.changed:
            self.got.append((sender, bytes(content), read))
            self.changed.notify_all()

    def lose(self, name):
        with self.changed:
            self.lost.append(name)
            self.changed.notify_all()

    def wait(self, ready):
        with self.changed:
            assert self.changed.wait_for(ready, HANG_S)


@pytest.fixture(autouse=True)
def no_thread_of_the_librarys():
    """End the thread by which pyzmq hears that memory it was lent has been sent."""
    yield
    garbage.gc.stop()


@pytest.fixture(params=[None, "127.0.0.1"], ids=["ipc", "tcp"])
def ends(request):
    made = [End(request.param), End(request.param)]
    made[0].start(other=made[1])
    made[1].start(one=made[0])
    yield made
    for end in made:
        end.mailbox.close()


@pytest.fixture
def far():
    made = [End("127.0.0.1"), End("127.0.0.1")]
    made[0].start(other=made[1])
    made[1].start(one=made[0])
    yield made
    for end in made:
        end.mailbox.close()


def test_messages_arrive_whole_and_in_order(ends):
    one, other = ends
    for number in range(50):
        assert one.mailbox.send("other", b"%d" % number, [LARGE] * (number % 3))
    other.wait(lambda: len(other.got) == 50)
    assert [content for _, content, _ in other.got] == [b"%d" % number for number in range(50)]
    assert all(frames == [bytes(LARGE)] * (number % 3) for number, (_, _, frames) in enumerate(other.got))
    assert {sender for sender, _, _ in other.got} == {"one"}


def test_a_peer_that_goes_is_noticed(ends):
    one, other = ends
    one.mailbox.send("other", b"x", [])
    other.wait(lambda: other.got)
    other.mailbox.close()
    one.wait(lambda: one.lost == ["other"])
    one.mailbox.forget("other")
    assert not one.mailbox.send("other", b"x", [])


def test_a_peer_that_was_gone_before_the_first_word_is_noticed():
    one, other = End(), End()
    one.start(other=other)
    other.start()
    other.mailbox.close()
    one.mailbox.send("other", b"x", [])
    one.wait(lambda: one.lost)
    one.mailbox.close()


def test_workers_of_one_machine_use_its_file_system_where_there_are_others_too(capfd):
    one, other = End("127.0.0.1"), End("127.0.0.1")
    one.mailbox.start({"other": other.near}, one.take, one.lose)
    other.mailbox.start({"one": one.near}, other.take, other.lose)
    one.mailbox.send("other", b"x", [LARGE])
    other.wait(lambda: other.got == [("one", b"x", [bytes(LARGE)])])
    for end in (one, other):
        end.mailbox.close()
    assert (one.lost, capfd.readouterr().err) == ([], "")


def test_nobody_else_may_enter_the_folder_and_it_is_removed():
    end = End()
    folder = Path(end.entry.address.removeprefix("ipc://")).parent
    found = folder.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, os.getuid())
    end.mailbox.close()
    assert not folder.exists()


def push_to(end, **options):
    """Connect as a stranger does."""
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 0)
    for name, value in options.items():
        setattr(push, name, value)
    push.connect(end.entry.address)
    return context, push


def undisturbed(one, other, capfd):
    """See that the others still talk, and that the log has one line about it."""
    before = len(other.got)
    one.mailbox.send("other", b"still here", [LARGE])
    other.wait(lambda: len(other.got) == before + 1)
    assert other.got[-1] == ("one", b"still here", [bytes(LARGE)])
    time.sleep(0.1)
    assert capfd.readouterr().err.count("paceline: refused: a message does not carry this run's secret") == 1


@pytest.mark.parametrize("options", [{}, {"plain_username": b"paceline", "plain_password": b"guessed"}])
def test_a_stranger_without_the_password_gets_nowhere(far, options, capfd):
    one, other = far
    context, push = push_to(other, **options)
    for _ in range(20):
        push.send_multipart([header(one.entry.boot, 1 << 40, 0) + b"garbage"])
    with socket.create_connection(("127.0.0.1", int(other.entry.address.rpartition(":")[2]))) as raw:
        raw.sendall(os.urandom(1000))
        if options:
            undisturbed(one, other, capfd)
        else:
            one.mailbox.send("other", b"still here", [])
            other.wait(lambda: other.got)
    context.destroy(linger=0)
    assert [content for _, content, _ in other.got] == [b"still here"]


def test_a_stranger_who_has_read_the_password_on_the_wire_has_no_key(far, capfd):
    one, other = far
    from paceline.transport.mailbox import _password

    context, push = push_to(other, plain_username=b"paceline", plain_password=_password(SECRET))
    for content in (
        b"",
        b"x",
        header(os.urandom(16), 1, 0) + b"x" * 40,
        header(one.entry.boot, 9, 0) + b"x" * 40,
    ):
        push.send(content)
    push.send_multipart([header(one.entry.boot, 9, 5) + b"x" * 40, b"y"])
    time.sleep(0.2)
    undisturbed(one, other, capfd)
    context.destroy(linger=0)
    assert len(other.got) == 1


def test_a_stranger_on_the_network_cannot_speak_as_a_worker_of_the_same_machine(capfd):
    """Those send without a seal, through the file system; over the network nothing is taken without one."""
    from paceline.transport.mailbox import _password

    near, far_away, listening = End("127.0.0.1"), End("127.0.0.1"), End("127.0.0.1")
    entries = {"near": near.near, "far": far_away.entry}
    listening.mailbox.start(entries, listening.take, listening.lose)
    context, push = push_to(listening, plain_username=b"paceline", plain_password=_password(SECRET))
    push.send(header(near.entry.boot, 1, 0) + b"do as I say")
    time.sleep(0.3)
    assert listening.got == []
    assert "did not come the way" in capfd.readouterr().err
    near.mailbox.start({"listening": listening.near}, near.take, near.lose)
    near.mailbox.send("listening", b"hello", [])
    listening.wait(lambda: listening.got == [("near", b"hello", [])])
    context.destroy(linger=0)
    for end in (near, far_away, listening):
        end.mailbox.close()


def test_an_exception_in_what_takes_a_message_costs_that_message_alone(capfd):
    one, other = End(), End()
    failed = []

    def fail_once(*message):
        if not failed:
            failed.append(message)
            raise ValueError("a callback of the user's")
        other.take(*message)

    one.start(other=other)
    other.mailbox.start({"one": one.entry}, fail_once, other.lose)
    for word in (b"first", b"second"):
        one.mailbox.send("other", word, [])
    other.wait(lambda: [content for _, content, _ in other.got] == [b"second"])
    assert "a callback of the user's" in capfd.readouterr().err
    for end in (one, other):
        end.mailbox.close()


def test_what_was_recorded_cannot_be_sent_again_cut_short_or_put_together_anew(far, capfd):
    """A listener on the wire has the password and every frame, of which each is sealed for one place in one message."""
    one, other = far
    from paceline.transport.mailbox import _password

    recorded = []
    seal = Seal(SECRET, one.entry.boot, other.entry.boot)
    for count in (1, 2):
        head = header(one.entry.boot, count, 1)
        recorded.append([head + seal.close(head, 0, b"word"), seal.close(head, 1, b"frame %d" % count)])
    context, push = push_to(other, plain_username=b"paceline", plain_password=_password(SECRET))
    push.send_multipart(recorded[1])  # as the sender itself would have
    other.wait(lambda: other.got)
    for again in (recorded[1], recorded[0], recorded[1][:1], [*recorded[1], b"more"]):
        push.send_multipart(again)
    time.sleep(0.2)
    assert other.got == [("one", b"word", [b"frame 2"])]
    assert capfd.readouterr().err.count("paceline: refused: ") == 1
    context.destroy(linger=0)


def test_a_frame_opens_only_in_its_place():
    sender, recipient = os.urandom(16), os.urandom(16)
    head, later = header(sender, 1, 2), header(sender, 2, 2)
    seal = Seal(SECRET, sender, recipient)
    closed = seal.close(head, 1, b"content")
    assert seal.open(head, 1, memoryview(closed)) == b"content"
    for wrong in (
        lambda: seal.open(head, 2, memoryview(closed)),
        lambda: seal.open(later, 1, memoryview(closed)),
        lambda: seal.open(head, 1, memoryview(closed)[:-1]),
        lambda: Seal(SECRET, recipient, sender).open(head, 1, memoryview(closed)),
        lambda: Seal(b"another", sender, recipient).open(head, 1, memoryview(closed)),
    ):
        with pytest.raises(SealError):
            wrong()


def test_idle_connections_and_half_a_handshake_keep_nobody_out(far):
    one, other = far
    port = int(other.entry.address.rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    for number, raw in enumerate(idle):
        raw.sendall((b"\xff" + bytes(8) + b"\x7f\x03\x00PLAIN")[: number % 17])
    one.mailbox.send("other", b"x", [LARGE])
    other.wait(lambda: other.got)
    for raw in idle:  # each is dropped when it has not given the password in time
        raw.settimeout(HANG_S)
        while raw.recv(4096):
            pass
        raw.close()


def test_a_frame_of_a_size_that_nobody_may_announce_is_not_set_aside_for(far):
    one, other = far
    with socket.create_connection(("127.0.0.1", int(other.entry.address.rpartition(":")[2]))) as raw:
        raw.settimeout(HANG_S)
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00PLAIN" + bytes(15) + b"\0" + bytes(31))
        raw.sendall(struct.pack(">BQ", 6, 1 << 50))
        while raw.recv(4096):
            pass
    one.mailbox.send("other", b"x", [])
    other.wait(lambda: other.got)
    assert HEADER_BYTES == 28

"""Messages between processes: they arrive whole and in order, and nobody without the secret gets a word in."""

import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from paceline.errors import PacelineError, RemoteError
from paceline.transport.admission import hello
from paceline.transport.incoming import ENTRY, LENGTH
from paceline.transport.mailbox import FORKED, Mailbox, PeerAddress
from paceline.transport.readers import Readers
from paceline.transport.sealing import HEADER_BYTES, LARGEST_HEAD, PIECE, Seal, SealError, header
from tests.patience import HANG_S

SECRET = b"a secret"
LARGE = memoryview(os.urandom(300_000))


class End:
    """A mailbox, what it got, and whom it lost."""

    def __init__(self, host=None, secret=SECRET):
        self.mailbox = Mailbox(secret)
        local, far = self.mailbox.bind(None, host)
        self.entry = PeerAddress(self.mailbox.boot, far or local)
        self.near = PeerAddress(self.mailbox.boot, local)
        self.got, self.lost = [], []
        self.changed = threading.Condition()

    def start(self, **others):
        self.mailbox.start({name: one.entry for name, one in others.items()}, self.take, self.lose)

    def take(self, sender, content, frames):
        read = [one.take().tobytes() for one in frames]
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


def connect(end):
    """Connect as a stranger does; return the connection and the number that it was given."""
    raw = socket.create_connection(("127.0.0.1", int(end.entry.address.rpartition(":")[2])), timeout=HANG_S)
    return raw, raw.recv(16)


def admitted(end, sender):
    """Connect as a worker does that knows the secret."""
    raw, nonce = connect(end)
    raw.sendall(sender.entry.boot + hello(SECRET, nonce, sender.entry.boot, end.entry.boot))
    assert raw.recv(1) == b"-"
    return raw


def framed(*parts):
    """Return a message as it is on the wire."""
    first, *rest = parts
    return LENGTH.pack(len(first)) + first + b"".join(rest)


def is_dropped(raw):
    """Return whether the other side has closed a connection."""
    raw.settimeout(HANG_S)
    try:
        while raw.recv(4096):
            pass
    except ConnectionResetError:
        pass
    raw.close()
    return True


def undisturbed(one, other, capfd):
    """See that the others still talk, and that the log has one line about it."""
    before = len(other.got)
    one.mailbox.send("other", b"still here", [LARGE])
    other.wait(lambda: len(other.got) == before + 1)
    assert other.got[-1] == ("one", b"still here", [bytes(LARGE)])
    time.sleep(0.1)
    assert capfd.readouterr().err.count("paceline: refused: a message does not carry this run's secret") == 1


@pytest.mark.parametrize("proof", ["none", "guessed", "recorded", "for another", "of another secret"])
def test_a_stranger_without_the_secret_gets_nowhere(far, proof, capfd):
    one, other = far
    raw, nonce = connect(other)
    boot = one.entry.boot
    given = {
        "none": b"\xff" + os.urandom(200),
        "guessed": boot + os.urandom(32),
        "recorded": boot + hello(SECRET, os.urandom(16), boot, other.entry.boot),
        "for another": boot + hello(SECRET, nonce, boot, boot),
        "of another secret": boot + hello(b"another", nonce, boot, other.entry.boot),
    }
    raw.sendall(given[proof] + framed(header(boot, 1, 0) + b"garbage"))
    assert is_dropped(raw)
    undisturbed(one, other, capfd)
    assert [content for _, content, _ in other.got] == [b"still here"]


def test_a_worker_of_another_run_gets_nowhere(far, capfd):
    one, other = far
    raw, nonce = connect(other)
    stranger = os.urandom(16)
    raw.sendall(stranger + hello(SECRET, nonce, stranger, other.entry.boot))
    assert is_dropped(raw)
    undisturbed(one, other, capfd)


def test_whoever_takes_over_a_connection_has_no_key(far, capfd):
    one, other = far
    for content in (
        framed(header(os.urandom(16), 1, 0) + b"x" * 40),
        framed(header(one.entry.boot, 9, 0) + b"x" * 40),
        framed(b"x"),
        LENGTH.pack(LARGEST_HEAD + 1000),
    ):
        end = End("127.0.0.1")
        end.start(one=one)
        raw = admitted(end, one)
        raw.sendall(content)
        assert is_dropped(raw)
        assert end.got == []
        end.mailbox.close()
    assert capfd.readouterr().err.count("paceline: refused: ") == 4
    one.mailbox.send("other", b"still here", [LARGE])
    other.wait(lambda: other.got)


def test_a_stranger_on_the_network_cannot_speak_as_a_worker_of_the_same_machine(capfd):
    """Those send without a seal, through the file system; over the network nothing is taken without one."""
    near, far_away, listening = End("127.0.0.1"), End("127.0.0.1"), End("127.0.0.1")
    entries = {"near": near.near, "far": far_away.entry}
    listening.mailbox.start(entries, listening.take, listening.lose)
    raw, nonce = connect(listening)
    raw.sendall(near.entry.boot + hello(SECRET, nonce, near.entry.boot, listening.entry.boot))
    raw.sendall(framed(header(near.entry.boot, 1, 0) + b"do as I say"))
    assert is_dropped(raw)
    assert listening.got == []
    assert "did not come the way" in capfd.readouterr().err
    near.mailbox.start({"listening": listening.near}, near.take, near.lose)
    near.mailbox.send("listening", b"hello", [])
    listening.wait(lambda: listening.got == [("near", b"hello", [])])
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


@pytest.mark.parametrize("wrong", ["again", "earlier", "another's frame", "cut short", "unsealed"])
def test_what_was_recorded_cannot_be_sent_again_cut_short_or_put_together_anew(wrong, capfd):
    """Each frame is sealed for one place in one message; whoever breaks in on the wire ends the connection, no more."""
    one, other = End("127.0.0.1"), End("127.0.0.1")
    other.start(one=one)
    recorded = {}
    seal = Seal(SECRET, one.entry.boot, other.entry.boot)
    for count in (1, 2, 3):
        head = header(one.entry.boot, count, 1)
        first = head + seal.close(head, 0, ENTRY.pack(7, 0) + b"word")
        recorded[count] = first, seal.close(head, 1, b"frame %d" % count)
    raw = admitted(other, one)
    raw.sendall(framed(*recorded[2]))  # as the sender itself would have
    other.wait(lambda: other.got)
    sent = {
        "again": framed(*recorded[2]),
        "earlier": framed(*recorded[1]),
        "another's frame": framed(recorded[3][0], recorded[1][1]),
        "cut short": framed(recorded[3][0][:-1], recorded[3][1]),
        "unsealed": framed(header(one.entry.boot, 3, 0) + b"word"),
    }
    raw.sendall(sent[wrong])
    assert is_dropped(raw)
    assert other.got == [("one", b"word", [b"frame 2"])]
    assert capfd.readouterr().err.count("paceline: refused: ") == 1
    for end in (one, other):
        end.mailbox.close()


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
        raw.sendall(os.urandom(number % 47))
    assert len(other.mailbox._admission._guests) <= 256
    one.mailbox.send("other", b"x", [LARGE])
    other.wait(lambda: other.got)
    assert all(is_dropped(raw) for raw in idle)  # each, when it has not proved itself in time


def test_a_message_of_a_size_that_nobody_may_announce_is_not_set_aside_for(far):
    one, _ = far
    assert HEADER_BYTES == 28
    listening = End("127.0.0.1")
    listening.start(one=one)
    raw = admitted(listening, one)
    raw.sendall(LENGTH.pack(0xFFFFFFFF))
    assert is_dropped(raw)
    listening.mailbox.close()


def test_what_is_sent_may_be_written_to_at_once(ends):
    one, other = ends
    memory = bytearray(3 * PIECE + 5)
    for number in range(20):
        memory[:] = bytes([number]) * len(memory)
        assert one.mailbox.send("other", b"", [memoryview(memory)])
        memory[:] = b"\xff" * len(memory)
    other.wait(lambda: len(other.got) == 20)
    assert all(frames == [bytes([at]) * len(memory)] for at, (_, _, frames) in enumerate(other.got))


@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["ipc", "tcp"])
def test_what_waits_for_a_peer_that_takes_nothing_is_bounded_and_never_sent_as_it_became_later(
    host, monkeypatch
):
    monkeypatch.setattr("paceline.transport.mailbox.Arena", no_memory)
    one, other = End(host), End(host)
    stopped = threading.Event()

    def take(*message):
        if bytes(message[1]) == b"stop":
            stopped.wait(HANG_S)
        other.take(*message)

    one.start(other=other)
    other.mailbox.start({"one": one.entry}, take, other.lose)
    one.mailbox.send("other", b"stop", [])
    memory = bytearray(b"a" * (32 << 20))
    assert one.mailbox.send("other", b"begun", [memoryview(memory)], deadline=time.monotonic() + 0.3)
    memory[:] = b"b" * len(memory)
    for _ in range(20):
        assert one.mailbox.send("other", b"dropped", [memoryview(memory)], deadline=time.monotonic() + 0.01)
    assert one.mailbox._ways["other"]._waiting <= 1.1 * len(memory)
    stopped.set()
    one.mailbox.send("other", b"last", [])
    other.wait(lambda: len(other.got) == 3)
    assert [content for _, content, _ in other.got] == [b"stop", b"begun", b"last"]
    assert other.got[1][2] == [b"a" * len(memory)]
    for end in (one, other):
        end.mailbox.close()


def no_memory(*_):
    raise OSError("there is none")


def test_a_thread_that_others_depend_on_never_waits_and_hears_that_too_much_is_waiting(ends, monkeypatch):
    one, _ = ends
    monkeypatch.setattr("paceline.transport.outgoing._MOST_COPIED", 1000)
    way = one.mailbox._ways["other"]
    with way._lock:
        way._connecting = threading.current_thread()  # as if it took its time
    for _ in range(2):
        assert one.mailbox.send("other", b"x" * 600, [], waits=False)
    with pytest.raises(RemoteError, match="other takes nothing of what is sent to it"):
        one.mailbox.send("other", b"x", [], waits=False)


def test_a_request_that_takes_its_time_keeps_no_other_waiting():
    one, other = End(), End()
    released, done = threading.Event(), []

    def take(_sender, content, _frames):
        word = bytes(content)

        def work():
            if word == b"slow":
                released.wait(HANG_S)
            done.append(word)

        return work

    one.start(other=other)
    other.mailbox.start({"one": one.entry}, take, other.lose)
    for word in (b"slow", b"first", b"second"):
        one.mailbox.send("other", word, [])
    limit = time.monotonic() + HANG_S
    while len(done) < 2 and time.monotonic() < limit:
        time.sleep(0.001)
    assert sorted(done) == [b"first", b"second"]
    released.set()
    while len(done) < 3 and time.monotonic() < limit:
        time.sleep(0.001)
    assert len(done) == 3
    for end in (one, other):
        end.mailbox.close()


def test_looking_again_at_a_connection_that_was_closed_meanwhile_is_nothing():
    readers = Readers()
    here, there = socket.socketpair()
    descriptor = here.fileno()
    readers.add(descriptor, lambda _: None)
    here.close()
    there.close()
    readers.arm(descriptor)
    readers.silence(descriptor)
    readers.close(1.0)


def test_a_forked_process_can_neither_speak_as_its_parent_nor_end_its_connections(ends):
    """It would use the same sockets, the same shared memory, and the same numbers for other messages."""
    one, other = ends
    one.mailbox.send("other", b"first", [])
    other.wait(lambda: other.got)
    child = os.fork()
    if child == 0:
        refused = 0
        for action in (lambda: one.mailbox.send("other", b"child", []), lambda: one.mailbox.reading("other")):
            try:
                action()
            except PacelineError as error:
                refused += str(error) == FORKED
        one.mailbox.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    one.mailbox.send("other", b"second", [])
    other.wait(lambda: len(other.got) > 1)
    assert [content for _, content, _ in other.got] == [b"first", b"second"]
    assert one.lost == other.lost == []


@pytest.mark.parametrize("begins", ["a large beginning", "a buffer"])
def test_whoever_reads_for_itself_is_not_kept_by_a_peer_that_stops_in_the_middle_of_a_message(begins):
    one, other = End("127.0.0.1"), End("127.0.0.1")
    other.start(one=one)
    raw = admitted(other, one)
    seal, content, large = (
        Seal(SECRET, one.entry.boot, other.entry.boot),
        b"x" * 200_000,
        bytes(LARGE[:200_000]),
    )
    if begins == "a buffer":
        head = header(one.entry.boot, 1, 1)
        message = framed(head + seal.close(head, 0, ENTRY.pack(len(large), 0)), seal.close(head, 1, large))
        wanted = ("one", b"", [large])
    else:
        head = header(one.entry.boot, 1, 0)
        message = framed(head + seal.close(head, 0, content))
        wanted = ("one", content, [])
    wait_until(lambda: "one" in other.mailbox._incoming)
    ended = threading.Event()

    def read():
        limit = time.monotonic() + 0.3
        with other.mailbox.reading("one") as reading:
            reading.until(lambda: time.monotonic() >= limit)
        ended.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    raw.sendall(message[:100_000])
    returned = ended.wait(2.0)
    raw.sendall(message[100_000:])  # others go on where it was
    other.wait(lambda: other.got)
    reader.join()
    assert returned
    assert other.got == [wanted]
    raw.close()
    for end in (one, other):
        end.mailbox.close()


@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["ipc", "tcp"])
def test_what_is_copied_is_sent_as_it_was_while_the_peer_takes_its_time(host, monkeypatch):
    """A service's own weights, say, which another thread goes on changing while the answer waits."""
    monkeypatch.setattr("paceline.transport.mailbox.Arena", no_memory)
    one, other = End(host), End(host)
    go_on = threading.Event()

    def take(*message):
        go_on.wait(HANG_S)
        other.take(*message)

    one.start(other=other)
    other.mailbox.start({"one": one.entry}, take, other.lose)
    one.mailbox.send("other", b"first", [])
    way = one.mailbox._ways["other"]
    wait_until(lambda: way._connection is not None and not way._queue)
    memory, odd = bytearray(b"a" * (16 << 20)), bytearray(b"a" * (PIECE + 1))
    frames = [memoryview(odd), memoryview(memory), memoryview(odd)]
    sending = threading.Thread(target=one.mailbox.send, args=("other", b"", frames), kwargs={"copies": True})
    sending.start()
    wait_until(lambda: way._queue)
    for one_buffer in (memory, odd):
        one_buffer[:] = b"b" * len(one_buffer)
    go_on.set()
    other.wait(lambda: len(other.got) == 2)
    sending.join()
    assert other.got[1][2] == [b"a" * len(frame) for frame in frames]
    for end in (one, other):
        end.mailbox.close()


def test_an_answer_without_large_buffers_does_not_wait_for_a_peer_that_takes_little(monkeypatch):
    one, other = End("127.0.0.1"), End("127.0.0.1")
    go_on = threading.Event()

    def take(*message):
        go_on.wait(HANG_S)
        other.take(*message)

    def waits(*_):
        go_on.set()
        raise AssertionError("it waits")

    one.start(other=other)
    other.mailbox.start({"one": one.entry}, take, other.lose)
    one.mailbox.send("other", b"first", [])
    way = one.mailbox._ways["other"]
    wait_until(lambda: way._connection is not None and not way._queue)
    monkeypatch.setattr(way, "_wait", waits)
    one.mailbox.send("other", b"x" * (15 << 20), [], copies=True)
    assert len(way._queue) == 1
    go_on.set()
    other.wait(lambda: len(other.got) == 2)
    for end in (one, other):
        end.mailbox.close()


def test_what_is_its_own_copy_is_not_copied_again(ends, monkeypatch):
    one, other = ends
    memory, way = bytearray(b"a" * (PIECE + 1)), one.mailbox._ways["other"]

    def full(_):
        raise MemoryError

    monkeypatch.setattr("paceline.transport.outgoing._Message.copy", full)
    with way._lock:
        way._connecting = threading.current_thread()  # as if it took its time
    assert one.mailbox.send("other", b"", [memoryview(memory)], waits=False, copies=True)
    memory[:] = b"b" * len(memory)
    way._connect()
    other.wait(lambda: [frames for *_, frames in other.got] == [[b"a" * len(memory)]])


@pytest.mark.parametrize("copies", [False, True])
def test_an_empty_buffer_keeps_its_place(ends, copies):
    one, other = ends
    assert one.mailbox.send("other", b"x", [memoryview(b""), LARGE], copies=copies)
    assert one.mailbox.send("other", b"y", [])
    other.wait(lambda: [len(frames) for *_, frames in other.got] == [2, 0])
    assert other.got[0][2] == [b"", bytes(LARGE)]


def test_connections_over_the_network_notice_a_machine_that_is_gone(far):
    one, other = far
    one.mailbox.send("other", b"x", [])
    other.wait(lambda: other.got)
    wait_until(lambda: one.mailbox._ways["other"]._connection is not None)
    for connection in (one.mailbox._ways["other"]._connection, other.mailbox._incoming["one"].connection):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
    # Keepalive is silent while something that was sent is unanswered.
    sending = one.mailbox._ways["other"]._connection
    assert sending.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000


def wait_until(ready):
    limit = time.monotonic() + HANG_S
    while not ready():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_a_message_that_there_is_no_memory_for_ends_the_connection_and_the_peer_is_lost(monkeypatch, capfd):
    monkeypatch.setattr("paceline.transport.mailbox.Arena", no_memory)
    one, other = End(), End()
    one.start(other=other)
    other.start(one=one)

    def full(_):
        raise MemoryError

    monkeypatch.setattr("paceline.transport.incoming.memory_of", full)
    one.mailbox.send("other", b"x", [memoryview(b"x" * 1000)])
    other.wait(lambda: other.lost == ["one"])
    one.wait(lambda: one.lost == ["other"])
    other.wait(lambda: not other.mailbox._incoming["one"].lock.locked())
    for end in (one, other):
        end.mailbox.close()
    assert "MemoryError" in capfd.readouterr().err


def test_a_peer_that_only_spoke_and_goes_is_noticed(ends):
    one, other = ends
    one.mailbox.send("other", b"x", [])
    other.wait(lambda: other.got)
    one.mailbox.close()
    other.wait(lambda: other.lost == ["one"])


def test_a_way_is_tried_again_where_no_thread_could_be_started(ends, monkeypatch):
    one, other = ends

    def none_left(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError):
            one.mailbox.send("other", b"first", [])
    one.mailbox.send("other", b"second", [])
    other.wait(lambda: [content for _, content, _ in other.got] == [b"second"])


def test_what_cannot_be_copied_is_not_sent_as_it_becomes_later(ends, monkeypatch):
    one, other = ends
    way = one.mailbox._ways["other"]

    def full(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(way, "_connecting", threading.current_thread())  # as if it took its time
        patch.setattr("paceline.transport.outgoing._Message.copy", full)
        with pytest.raises(MemoryError):
            one.mailbox.send("other", b"first", [memoryview(bytearray(1000))], waits=False)
    assert (len(way._queue), way._waiting) == (0, 0)
    one.mailbox.send("other", b"second", [])
    other.wait(lambda: [content for _, content, _ in other.got] == [b"second"])


def test_closing_waits_for_no_request_that_is_being_carried_out():
    one, other = End(), End()
    began, released = threading.Event(), threading.Event()

    def work():
        began.set()
        released.wait(HANG_S)

    one.start(other=other)
    other.mailbox.start({"one": one.entry}, lambda *_: work, other.lose)
    one.mailbox.send("other", b"x", [])
    assert began.wait(HANG_S)
    before = time.monotonic()
    other.mailbox.close()
    seconds = time.monotonic() - before
    released.set()
    one.mailbox.close()
    assert seconds < 4

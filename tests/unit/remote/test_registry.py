"""What may be called, and what may travel."""

import os
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from paceline import remote
from paceline.errors import CallRefusedError, InputError, UnknownNameError
from paceline.remote import registry
from paceline.remote.failures import CallFailure
from paceline.remote.meeting import meet
from paceline.remote.names import Roles
from paceline.remote.vocabulary import Registered
from paceline.transport.mailbox import Mailbox
from paceline.transport.values import Reader, UnsendableError, Writer


@remote.service
class Shop:
    def buy(self, what):
        return what

    def _steal(self):
        pass


@remote.function
def tell():
    return 1


@remote.allow
@dataclass
class Price:
    cents: int


@dataclass
class Secret:
    text: str


class Harmful:
    def __reduce__(self):
        return (os.system, ("true",))


@remote.allow
class Sly:
    """Is registered, but would be made again by something that is not."""

    def __reduce__(self):
        return (os.system, ("true",))


@remote.allow
class Point(NamedTuple):
    x: int
    y: float


@remote.allow
class Colour(Enum):
    RED = 1


@remote.allow
@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    values: tuple[int, ...] = ()


@remote.allow
class Basket(dict):
    pass


@remote.allow
class Counter:
    def __init__(self, start):
        self.count, self.scratch = start, object()

    def __getstate__(self):
        return self.count

    def __setstate__(self, state):
        self.count = state


class Frame:
    """A frame as it would arrive."""

    def __init__(self, content):
        self._content, self.size = bytearray(content), len(content)

    def take(self):
        return np.frombuffer(self._content, np.uint8)


def travel(value):
    """Write a value as one worker does, and read it as another."""
    writer = Writer(Registered(), "server:0")
    head = writer.head(value)
    return Reader(Registered(), memoryview(head), [Frame(one) for one in writer.frames]).value()


def test_a_service_offers_its_public_methods():
    found = registry.find_service(registry.address_of(Shop))
    assert list(found.methods) == ["buy"]
    assert registry.described(Shop) is found


def test_what_is_not_registered_is_not_found():
    with pytest.raises(CallRefusedError, match="os:system is not registered as a function"):
        registry.find_function("os:system")
    with pytest.raises(CallRefusedError, match="is not registered as a service"):
        registry.find_service("os:_Environ")
    with pytest.raises(InputError, match=r"put @remote\.service above"):
        registry.described(Secret)
    with pytest.raises(InputError, match=r"put @remote\.function above it"):
        registry.check_function(os.getpid)
    assert registry.check_function(tell) == f"{__name__}:tell"


def test_what_other_workers_could_not_find_is_refused_at_once():
    with pytest.raises(InputError, match="defined inside a function"):

        @remote.function
        def inner():
            pass

    with pytest.raises(InputError, match="has no public method"):
        remote.service(Secret)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, b"x", "text"], (1, 2): {3}},
        {None: 1, 2: {}, "": [], (): ((),)},
        [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 0.1],
        [1 << 62, -(1 << 63), 1 << 63, 1 << 5000, -(1 << 5000)],
        "\u20ac \ud800 \0",
        b"x" * 10_000,
        bytearray(b"abc"),
        {"i": "0x1"},
        frozenset({1, "a"}),
        slice(1, None, 2),
        deque([1, 2], maxlen=3),
        OrderedDict(a=1),
        range(3),
        1 + 2j,
        date(2026, 1, 1),
        datetime(2026, 1, 1),
        datetime(2026, 1, 1, 2, 3, 4, 5, tzinfo=UTC, fold=1),
        time(1, 2, 3, tzinfo=timezone(timedelta(hours=1), "here")),
        timedelta(days=-1, microseconds=3),
        Decimal("1.10"),
        Fraction(1, 3),
        UUID(int=7),
        Path("a/b"),
        PurePosixPath("/c"),
        np.float32(0.5),
        np.float64(0.1),
        np.datetime64("2026-01-01"),
        np.dtype([("a", "<i4"), ("b", "<f8")]),
        torch.bfloat16,
        torch.Size([2, 3]),
        torch.device("cpu"),
        ValueError("no"),
        InputError("no"),
        Price(5),
        Price,
        Point(1, 2.0),
        Colour.RED,
        Frozen("a", (1, 2)),
        Basket(a=[1]),
    ],
)
def test_plain_values_and_registered_ones_travel(value):
    found = travel(value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_an_object_travels_by_the_state_that_it_gives():
    made = travel([Counter(3), Basket(a=Price(2))])
    assert (made[0].count, vars(made[0]).keys(), made[1]["a"].cents) == (3, {"count"}, 2)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(20_000.0)[::2],
        np.zeros((0, 3)),
        np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
        np.array(["a", "bc"]),
    ],
)
def test_an_array_travels(value):
    found = travel(value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.flags.f_contiguous == value.flags.f_contiguous or not value.flags.contiguous
    assert found.tobytes() == value.tobytes()
    found[...] = found[...]  # it may be written to


@pytest.mark.parametrize("dtype", sorted(map(str, {torch.float32, torch.bfloat16, torch.bool, torch.int64})))
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 2), (40, 50)])
def test_a_tensor_travels(dtype, shape):
    value = (torch.rand(shape) * 2).to(getattr(torch, dtype[6:]))
    found = travel(value)
    assert (found.dtype, found.shape, found.stride()) == (value.dtype, value.shape, value.stride())
    assert torch.equal(found, value)
    found.zero_()


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(3, 4).t(),
        torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.rand(10, 10)[::2, 1:],
        torch.rand(3).expand(2, 3),
        torch.view_as_complex(torch.rand(3, 2)).conj(),
        torch.rand(3, 4).to(torch.float8_e4m3fn),
        torch.eye(3).to_sparse(),
        torch.rand(2, requires_grad=True) * 2,
        nn.Parameter(torch.rand(2), requires_grad=False),
    ],
    ids=range(9),
)
def test_what_a_tensor_is_stays(value):
    found = travel([value])[0]
    for what in ("dtype", "shape", "layout", "requires_grad"):
        assert getattr(found, what) == getattr(value, what)
    assert type(found) is type(value)
    assert found.is_leaf
    assert torch.equal(*(one.detach().to_dense().to(torch.complex64) for one in (found, value)))


def test_the_order_of_a_tensors_memory_stays_where_it_has_no_gaps():
    for value in (torch.rand(3, 4).t(), torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)):
        assert travel(value).stride() == value.stride()
    assert travel(torch.rand(10, 10)[::2, 1:]).is_contiguous()


@pytest.mark.parametrize("value", [Secret("x"), Harmful(), os.getpid, eval, SystemExit(), threading.Thread])
def test_nothing_else_does(value):
    with pytest.raises(CallRefusedError, match="is not registered, so no call may name it here"):
        travel([value])


@pytest.mark.parametrize("value", [threading.Lock(), np.array([object()]), Sly()])
def test_what_has_no_form_on_the_wire_is_said_to_have_none(value):
    with pytest.raises(UnsendableError):
        travel([value])


def test_what_holds_itself_has_no_end():
    value = []
    value.append(value)
    with pytest.raises(UnsendableError, match="holds itself"):
        travel(value)


def test_an_exception_is_made_again_with_the_traceback_of_where_it_was():
    try:
        {}["a"]
    except KeyError as error:
        sent = CallFailure.of(error, "server:0")
    made = CallFailure(*travel(sent.state())).exception()
    assert (type(made), made.args) == (KeyError, ("a",))
    assert "On server:0:" in made.__notes__[0]
    assert __file__ in made.__notes__[0]


class Grade(StrEnum):
    GOOD = "good"


@remote.allow
class CountError(Exception):
    """Makes words of its own."""

    def __init__(self, count):
        super().__init__(f"the count is {count}")


@pytest.mark.parametrize(
    "error", [CountError(3), ValueError(Grade.GOOD), UnknownNameError("role", "a", ["b"]), KeyError((1, 2))]
)
def test_an_exception_keeps_its_type_and_its_words(error):
    made = CallFailure(*travel(CallFailure.of(error, "server:0").state())).exception()
    assert type(made) is type(error)
    assert str(error) in str(made)
    assert str(made).count("count") == str(error).count("count")


def meet_all(*secrets):
    """Let workers with these secrets meet at one store; give what each got or was told."""
    store, found = HashStore(), {}
    roles = Roles.of({"workers": len(secrets)})
    met = threading.Barrier(len(secrets))

    def enter(rank):
        mailbox = Mailbox(secrets[rank])
        try:
            found[rank] = meet(
                store, rank, roles, secrets[rank], mailbox, interface="lo", machine=f"of {rank // 2}"
            )
        except CallRefusedError as error:
            found[rank] = str(error)
        finally:
            met.wait(60)
            mailbox.close()

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(len(secrets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(len(secrets))]


def test_workers_with_one_secret_know_where_all_are():
    first, second, third = meet_all(b"x", b"x", b"x")
    assert [one.boot for one in first.values()] == [one.boot for one in third.values()]
    assert [one.sealed for one in first.values()] == [one.sealed for one in second.values()]
    assert [one.sealed for one in third.values()] == [True, True, False]
    assert meet_all(b"x")[0]["worker:0"].boot != first["worker:0"].boot


def test_a_worker_with_another_secret_is_refused_by_all():
    for told in meet_all(b"x", b"x", b"y")[:2]:
        assert told.startswith("worker:2 does not know this run's secret, so nobody works with it.")


def test_an_entry_that_a_stranger_has_planted_is_refused():
    store = HashStore()
    roles = Roles.of({"workers": 2})
    store.set("begun/1", '["00", "of 0"]')
    store.set("entry/1", '["00", "of 0", "ipc:///nowhere", "tcp://127.0.0.1:1"]')
    store.set("proof/1", "00" * 32)
    mailbox = Mailbox(b"x")
    with pytest.raises(CallRefusedError, match=r"worker:1 does not know this run's secret"):
        meet(store, 0, roles, b"x", mailbox, interface="lo", machine="of 0")
    mailbox.close()


@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_a_quantized_tensor_is_refused_where_it_is_sent_and_where_it_is_read(dtype):
    value = torch.quantize_per_tensor(torch.randn(10), 0.1, 0, dtype)
    with pytest.raises(UnsendableError, match=f"a tensor of the type {dtype} has no form on the wire"):
        travel(value)
    head = Writer(Registered(), "server:0").head(torch.zeros(10, dtype=torch.int8))
    forged = head.replace(b'"int8"', f'"{str(dtype).removeprefix("torch.")}"'.encode())
    forged = (len(forged) - len(head) + int.from_bytes(head[:4], "little")).to_bytes(4, "little") + forged[4:]
    assert forged != head
    with pytest.raises(CallRefusedError, match="a type that no tensor may have here"):
        Reader(Registered(), memoryview(forged), []).value()


def test_tensors_of_every_other_type_travel():
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.uint16,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.bool,
    ):
        value = torch.ones(5).to(dtype)
        assert travel(value).dtype == dtype
        assert torch.equal(travel(value).view(torch.uint8), value.view(torch.uint8))

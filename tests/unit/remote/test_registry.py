"""What may be called, and what may travel."""

import io
import os
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from paceline import remote
from paceline.errors import CallRefusedError, InputError, UnknownNameError
from paceline.remote import guard, registry
from paceline.remote.failures import Failure, translate
from paceline.remote.names import Roles
from paceline.remote.session import _prove


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


def read(content):
    return guard.Guard(io.BytesIO(content)).load()


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
        OrderedDict(a=1),
        range(3),
        1 + 2j,
        datetime(2026, 1, 1),
        Path("a/b"),
        np.float32(0.5),
        torch.bfloat16,
        torch.Size([2, 3]),
        torch.device("cpu"),
        ValueError("no"),
        Price(5),
    ],
)
def test_plain_values_and_registered_ones_travel(value):
    found = read(pickle.dumps(value))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_an_array_travels():
    assert np.array_equal(read(pickle.dumps(np.arange(6).reshape(2, 3))), np.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    "value", [Secret("x"), Harmful(), os.getpid, eval, getattr, SystemExit(), threading.Thread]
)
def test_nothing_else_does(value, capsys):
    content = pickle.dumps(value)
    if value is getattr:  # torch's own messages name it, for two purposes
        with pytest.raises(AttributeError, match="no call may name system"):
            read(content)(os, "system")
        return
    with pytest.raises(guard.UnregisteredError, match="is not registered, so no call may name it here"):
        read(content)
    assert capsys.readouterr().err.startswith("paceline: refused: ")


def test_an_exception_is_made_again_with_the_traceback_of_where_it_was():
    try:
        {}["a"]
    except KeyError as error:
        sent = Failure.of(error, "server:0")
    made = read(pickle.dumps(sent)).exception()
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
    made = read(pickle.dumps(Failure.of(error, "server:0"))).exception()
    assert type(made) is type(error)
    assert str(error) in str(made)
    assert str(made).count("count") == str(error).count("count")


def test_a_message_is_read_only_with_the_seal_of_the_session():
    content, tensors = guard.Sealed(b"key").serialize({"a": [1]})
    assert guard.Sealed(b"key").deserialize(content, tensors) == {"a": [1]}
    changed = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]
    plain = pickle.dumps({"a": [1]})
    for key, message in ((b"other", content), (b"key", changed), (b"key", plain), (b"key", b"")):
        refused = guard.refusal(guard.Sealed(key).deserialize(message, []))
        assert isinstance(refused, CallRefusedError)
        assert str(refused) == "a message does not carry this run's secret"


def test_the_transports_words_are_translated():
    said = translate(
        RuntimeError("RPCErr:1:RPC ran for more than set timeout (200 ms)"), "server:0", "f", 0.2
    )
    assert str(said).startswith("f on server:0 gave no answer within 0.2 s.")
    for words in ("eof (this error originated at x)", "pipe closed", "ECONNREFUSED: connection refused"):
        assert "server:0 is gone" in str(translate(RuntimeError(words), "server:0", "f", 1))
    for words in (
        "CUDA out of memory",
        "sizeof is wrong",
        "bad\nTraceback (most recent call last): connection.py",
    ):
        other = RuntimeError(words)
        assert translate(other, "server:0", "f", 1) is other


def prove_all(*secrets):
    """Let workers with these secrets meet at one store; give what each got or was told."""
    store, found = HashStore(), {}
    roles = Roles.of({"workers": len(secrets)})

    def prove(rank):
        try:
            found[rank] = _prove(store, rank, roles, secrets[rank])
        except CallRefusedError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=prove, args=(rank,)) for rank in range(len(secrets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(len(secrets))]


def test_workers_with_one_secret_have_one_token_and_another_one_each_time():
    first, second, third = prove_all(b"x", b"x", b"x")
    assert first == second == third
    assert prove_all(b"x", b"x")[0] != first


def test_a_worker_with_another_secret_is_refused_by_all():
    for told in prove_all(b"x", b"x", b"y")[:2]:
        assert told.startswith("worker:2 does not know this run's secret, so nobody works with it.")

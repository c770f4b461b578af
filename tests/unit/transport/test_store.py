"""The run's store: what it answers, and to whom."""

import gc
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, ProcessGroupGloo

from paceline.errors import PacelineError
from paceline.transport import key_value
from paceline.transport.key_value import ERROR, OK, KeyValueTable, unpack
from paceline.transport.secret import Secret
from paceline.transport.store import RunStore, StoreTimeoutError
from paceline.transport.store_server import StoreServer


@pytest.fixture(params=["ipc", "tcp"])
def server(request, tmp_path):
    secret = Secret.make() if request.param == "tcp" else None
    made = StoreServer("tcp://127.0.0.1:*" if secret else f"ipc://{tmp_path}/store", secret=secret)
    made.secret = secret
    yield made
    made.close()


@pytest.fixture
def store(server):
    return RunStore(server.address, secret=server.secret, timeout_s=5.0)


def later(action, after=0.1):
    threading.Timer(after, action).start()


def test_as_torchs_own(store):
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert (store.add("n", 3), store.add("n", -1), store.get("n")) == (3, 2, b"2")
    assert (store.check(["a", "n"]), store.check(["a", "no"])) == (True, False)
    assert store.compare_set("c", "", "x") == b"x"
    assert store.compare_set("c", "other", "y") == b"x"
    assert store.compare_set("c", "x", "y") == b"y"
    assert store.compare_set("new", "expected", "y") == b"expected"
    assert (store.delete_key("c"), store.delete_key("c"), store.num_keys()) == (True, False, 2)
    store.multi_set(["m", "k"], [b"\x00\xff", "text"])
    store.append("k", "s")
    assert store.multi_get(["m", "k"]) == [b"\x00\xff", b"texts"]


def test_a_clone_is_the_same_store(store):
    store.set("group/a", "1")
    assert PrefixStore("group", store).clone().get("a") == b"1"


def test_a_request_that_is_too_large_is_refused_here(store):
    with pytest.raises(PacelineError, match="at most"):
        store.set("a", b"x" * (65 << 20))
    store.set("a", "1")


def test_a_wait_ends_when_the_last_key_is_there(store):
    store.set("a", "1")
    later(lambda: store.set("b", "2"))
    store.wait(["a", "b"])
    later(lambda: store.set("c", "3"))
    assert store.get("c") == b"3"


def test_a_wait_that_lasts_too_long(server):
    store = RunStore(server.address, secret=server.secret, timeout_s=0.2)
    with pytest.raises(StoreTimeoutError, match="timed out waiting for never"):
        store.get("never")
    store.set("a", "1")  # the connection of the request that timed out is not used again
    assert store.get("a") == b"1"


def test_an_interruption_ends_this_groups_waits_alone(store):
    group, other = (store.for_group(timeout_s=5.0, timed_out=StoreTimeoutError) for _ in range(2))
    later(lambda: group.interrupt(lambda: RuntimeError("broken")))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="broken"):
        group.get("never")
    assert time.monotonic() - began < 2
    group.set("a", "1")  # who leaves may still say so
    with pytest.raises(RuntimeError, match="broken"):
        group.get("a")
    assert other.get("a") == b"1"


def test_a_store_that_the_garbage_collector_finds_in_a_circle_keeps_nobody_waiting(server):
    for _ in range(3):
        store = RunStore(server.address, secret=server.secret)
        store.set("a", "1")
        circle = [store, store._connections, store._connections._free, store._connections._context]
        circle.append(circle)
        store._connections.circle = circle
        del store, circle
        gc.collect()


def test_what_is_refused(store):
    store.set("word", "one")
    with pytest.raises(PacelineError, match="refused a request: add needs a number"):
        store.add("word", 1)
    assert store.get("word") == b"one"


def test_a_group_forms_with_three_requests_per_worker(server):
    size = 6
    stores = [RunStore(server.address, secret=server.secret) for _ in range(size)]
    groups = []

    def join(rank):
        with stores[rank].gathering(size):
            groups.append(ProcessGroupGloo(PrefixStore("group", stores[rank]), rank, size))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(groups) == size
    assert server.requests == 3 * size


def test_without_the_secret_nothing_is_answered(server):
    if server.secret is None:
        pytest.skip("on one machine the folder's permissions are the lock")
    friend = RunStore(server.address, secret=server.secret)
    friend.set("a", "1")
    for secret in (None, Secret.make()):
        stranger = RunStore(server.address, secret=secret, timeout_s=0.5)
        with pytest.raises(StoreTimeoutError):
            stranger.set("a", "2")
    assert friend.get("a") == b"1"


def test_a_key_that_is_deleted_while_another_is_awaited():
    table, asker = KeyValueTable(), (b"peer", b"1")
    table.take(asker, [b"set", b"a", b"1"])
    assert table.take(asker, [b"get", b"a", b"b"]) == []
    table.take(asker, [b"delete", b"a"])
    assert table.take(asker, [b"set", b"b", b"2"]) == [(asker, [OK])]
    assert table.take(asker, [b"set", b"a", b"3"]) == [(asker, [OK, b"3", b"2"]), (asker, [OK])]


def test_requests_that_mean_nothing():
    table, asker = KeyValueTable(), (b"peer", b"1")
    for request in ([], [b"run"], [b"set", b"a"], [b"add", b"a"], [b"add", b"a", b"x"], [b"delete"]):
        ((who, (status, _)),) = table.take(asker, request)
        assert (who, status) == (asker, ERROR)


def test_who_is_gone_is_not_answered():
    table, asker = KeyValueTable(), (b"peer", b"1")
    assert table.take(asker, [b"get", b"a"]) == []
    table.forget(b"peer")
    assert table.take((b"other", b"2"), [b"set", b"a", b"1"]) == [((b"other", b"2"), [OK])]


@pytest.mark.parametrize("form", [b"get", b"wait", b"gather"])
def test_a_request_that_is_repeated_is_answered_once(form):
    table = KeyValueTable()
    request = [form, b"folder", b"1"] if form == b"gather" else [form, b"folder/0"]
    for _ in range(3):
        assert table.take((b"peer", b"1"), request) == []
    assert table.take((b"peer", b"2"), request) == []
    answers = table.take((b"peer", b"3"), [b"set", b"folder/0", b"value"])
    assert [asker for asker, _ in answers] == [(b"peer", b"1"), (b"peer", b"2"), (b"peer", b"3")]
    assert len(table.take((b"peer", b"1"), request)) == 1


def test_a_time_out_that_is_set_through_torchs_prefix_counts(store):
    group = PrefixStore("group", store)
    group.set_timeout(timedelta(seconds=0.2))
    assert (store.timeout, group.timeout) == (timedelta(seconds=0.2), timedelta(seconds=0.2))
    began = time.monotonic()
    with pytest.raises(StoreTimeoutError, match="timed out waiting for group/never"):
        group.get("never")
    assert time.monotonic() - began < 4


def test_a_wait_lasts_as_long_as_it_was_given(server):
    store = RunStore(server.address, secret=server.secret, timeout_s=0.2)
    group = PrefixStore("group", store)
    began = time.monotonic()
    with pytest.raises(StoreTimeoutError, match="timed out waiting for group/never"):
        group.wait(["never"], timedelta(seconds=0.5))
    assert time.monotonic() - began >= 0.5
    store.set_timeout(timedelta(seconds=60))
    began = time.monotonic()
    with pytest.raises(StoreTimeoutError):
        group.wait(["never"], timedelta(seconds=0.2))
    assert time.monotonic() - began < 30


def test_those_who_come_late_are_awaited_longer_than_a_connection(store):
    """Gloo hands the store the time that it has for connecting, which is short where a group forms once more."""
    groups = []

    def join(rank):
        mine = store.for_group(timeout_s=10.0, timed_out=StoreTimeoutError)
        with mine.gathering(2):
            groups.append(ProcessGroupGloo(PrefixStore("late", mine), rank, 2, timedelta(seconds=0.5)))
        groups.append(mine)

    first = threading.Thread(target=join, args=(0,))
    first.start()
    time.sleep(1.0)
    join(1)
    first.join()
    assert len(groups) == 4


def test_several_values_that_do_not_fit_together_are_not_stored_in_part(monkeypatch):
    """Else who waits for the first of them would never be answered."""
    monkeypatch.setattr(key_value, "LARGEST_TABLE", 20)
    table, asker, waiting = KeyValueTable(), (b"peer", b"1"), (b"other", b"2")
    assert table.take(waiting, [b"get", b"a"]) == []
    ((who, (status, words)),) = table.take(asker, [b"set", b"a", b"1", b"b", b"x" * 30])
    assert (who, status, words) == (asker, ERROR, b"the store is full: it holds 0 bytes")
    assert table.take(asker, [b"count"]) == [(asker, [OK, b"0"])]
    fits = [b"set", b"a", b"x" * 30, b"b", b"2", b"a", b"1"]  # the last of a key's values counts
    assert table.take(asker, fits) == [(waiting, [OK, b"1"]), (asker, [OK])]
    assert table.take(asker, [b"set", b"a", b"y" * 17]) == [(asker, [OK])]
    ((_, (status, _)),) = table.take(asker, [b"set", b"a", b"y" * 18])
    assert status == ERROR


def gathered(answers):
    return {asker: unpack(frames[1]) for asker, frames in answers if len(frames) == 2}


def test_what_all_ranks_ask_for_is_made_once_for_all_of_them():
    table = KeyValueTable()
    first, second, third = ((name, b"1") for name in (b"a", b"b", b"c"))
    assert table.take(first, [b"gather", b"g/0", b"2"]) == []
    assert table.take(second, [b"gather", b"g/0", b"2"]) == []
    assert table.take(second, [b"gather", b"g/0", b"2"]) == []  # asked again: it is answered once
    assert table.take(third, [b"gather", b"g/0", b"3"]) == []  # another group's
    table.take(first, [b"set", b"g/0/1", b""])
    table.forget(b"c")
    answers = table.take(second, [b"set", b"g/0/0", b"xyz"])
    assert gathered(answers) == {first: [b"xyz", b""], second: [b"xyz", b""]}
    assert [asker for asker, _ in answers] == [first, second, second]
    assert gathered(table.take(third, [b"gather", b"g/0", b"2"])) == {third: [b"xyz", b""]}
    table.take(first, [b"set", b"g/0/1", b"new"])
    assert gathered(table.take(third, [b"gather", b"g/0", b"2"])) == {third: [b"xyz", b"new"]}
    table.take(first, [b"delete", b"g/0/0"])
    assert table.take(third, [b"gather", b"g/0", b"2"]) == []
    assert (len(table._waiting), len(table._by_peer), len(table._gathering)) == (1, 1, 1)
    table.forget(b"c")
    assert (table._waiting, table._by_peer, table._gathering) == ({}, {}, {})


@pytest.mark.parametrize("count", [b"0", b"-1", b"x", b"", b"100001", b"9" * 5000])
def test_a_number_that_nobody_gathers(count):
    ((_, (status, _)),) = KeyValueTable().take((b"peer", b"1"), [b"gather", b"g", count])
    assert status == ERROR

"""What one worker finds out about calls to the others; each check gives plain values for a test to judge."""

from __future__ import annotations

import inspect
import json
import os
import time
from pathlib import Path

import torch

from paceline import remote
from paceline.errors import PacelineError
from paceline.remote.exchange import _ROUTE, CREATE, FUNCTION, METHOD
from paceline.remote.pending import PendingCall
from tests.dist.remote.services import (
    LIMIT_S,
    Batches,
    Desk,
    Keeper,
    Layer,
    OwnError,
    Unregistered,
    count_alive,
    hop,
    layer,
    passes,
)


def caught(action):
    """Give the type, the words and the notes of what an action raises."""
    try:
        return "nothing", repr(action()), ""
    except (PacelineError, OwnError, KeyError, ZeroDivisionError, RuntimeError, TypeError) as error:
        return type(error).__name__, str(error), "\n".join(getattr(error, "__notes__", []))


def eventually(wanted, action):
    """Give what an action gives, once that is what is wanted; freeing travels behind the calls."""
    limit = time.monotonic() + LIMIT_S
    while (found := action()) != wanted and time.monotonic() < limit:
        time.sleep(0.01)
    return found


def hops():
    return hop(["server:0", "server:1", "trainer:1", "trainer:0", "server:0"], [])


def own_calls():
    desk = remote.create("trainer:0", Desk, 5)
    return desk.add(2), desk.where(), remote.call("trainer:0", hop)([], []), remote.service_of(desk).count


class Asking(torch.utils.data.Dataset):
    """A dataset whose samples come from another worker."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return remote.call("server:0", hop)([], [])


def forked():
    """Call from a process that loads data, and from the worker itself after that."""
    asking = Asking()
    loader = torch.utils.data.DataLoader(asking, num_workers=1, multiprocessing_context="fork")
    return *caught(lambda: list(loader))[:2], asking[1]


def described():
    desk = remote.create("server:0", Desk)
    return (
        type(desk).__doc__,
        desk.add.__doc__,
        str(inspect.signature(desk.add)),
        desk.add.__annotations__ == Desk.add.__annotations__,
        repr(desk),
    )


def failures():
    desk, keeper = remote.create("server:0", Desk), remote.create("server:1", Keeper)
    keeper.keep(desk)
    found = {kind: caught(lambda kind=kind: desk.fail(kind)) for kind in ("own", "key", "strange")}
    found["far"] = caught(lambda: keeper.fail("own"))
    found["kept"] = caught(desk.fail.remote("key").fetch)
    found["arguments"] = caught(lambda: desk.add(1, 2))
    found["leave"] = caught(desk.leave)
    found["name"] = caught(lambda: remote.call("server:0", hop)(["server:7"], []))
    return found


def unsendable():
    desk = remote.create("server:0", Desk)
    return caught(desk.unsendable), desk.add(), sorted(remote.current().lost)


def dropped():
    """Let go of services before their answers are there: nobody else holds them."""
    for _ in range(200):
        remote.create("server:0", Desk).add.future().wait()
        remote.create("server:0", Desk).add.remote().fetch()
    return remote.create("server:0", Desk).twice(4)


def references():
    """Follow one value and one service from the first holder to the last."""
    before = eventually(0, remote.call("server:0", count_alive))  # those of other checks are on their way out
    desk, keeper = remote.create("server:0", Desk), remote.create("server:1", Keeper)
    thing = desk.thing.remote()
    identity = thing.identity

    def holders():
        return next((one.holders for one in remote.references() if one.identity == identity), ())

    seen = [holders()]
    keeper.keep(thing)
    seen.append(holders())
    local = caught(thing.local)
    del thing
    seen.append(eventually(("server:1",), holders))
    both = remote.call("server:0", count_alive)() - before
    keeper.drop()
    seen.append(eventually((), holders))
    one = eventually(before + 1, remote.call("server:0", count_alive)) - before
    keeper.keep(desk)
    del desk
    far = keeper.add(4), keeper.add(3)
    keeper.drop()
    none = eventually(before, remote.call("server:0", count_alive)) - before
    return {"holders": seen, "alive": (both, one, none), "far": far, "local": local, "before": before}


def gradients():
    """Train three layers on three workers, and the same in this process alone."""
    near = layer(3)
    parts = [remote.create("server:0", Layer, 1), remote.create("server:1", Layer, 2)]
    trained = [one for part in parts for one in part.parameters()] + list(near.parameters())
    optimizer = remote.Optimizer(torch.optim.Adam, trained, lr=0.1)
    alone = [layer(seed) for seed in (1, 2, 3)]
    reference = torch.optim.Adam([one for part in alone for one in part.parameters()], lr=0.1)
    torch.manual_seed(0)
    for inputs in torch.randn(3, 5, 8):
        with remote.backward_pass(optimizer) as pass_:
            # There, on to the next, here, and back to the first.
            hidden = parts[0].forward(near(parts[1].forward(parts[0].forward(inputs))))
            pass_.backward(hidden.square().sum())
            pass_.step()
        reference.zero_grad()
        alone[0](alone[2](alone[1](alone[0](inputs)))).square().sum().backward()
        reference.step()
    found = [*parts[0].state(), *parts[1].state(), *near.parameters()]
    expected = [one for part in alone for one in part.parameters()]
    moved = not torch.equal(found[0], next(iter(layer(1).parameters())))
    return moved, all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def overlap():
    """Two trainers run passes over one layer at once."""
    desk, part = remote.create("server:1", Desk), remote.create("server:0", Layer, 1)
    other = remote.call("trainer:1", passes).future(desk, part, 8)
    return passes(desk, part, 7), other.wait(), desk.add(0)


def patience():
    desk = remote.create("server:0", Desk)
    late = caught(desk.stall.options(timeout=0.2))
    desk.release()
    carried_out = eventually(1, lambda: desk.add(0))
    stubborn = remote.create("server:0", Desk)
    tries = stubborn.third_time.options(timeout=1, retries=60)()
    stubborn.release()
    once = remote.create("server:0", Desk)
    given_up = caught(once.third_time.options(timeout=0.2))
    count = once.add(0)
    once.release()
    return {
        "late": late,
        "carried out": carried_out,
        "tries": tries,
        "given up": given_up,
        "calls without a retry": count,
        "not idempotent": caught(lambda: desk.add.options(retries=1)),
        "not a time": caught(lambda: desk.add.options(timeout=0)),
    }


def batches():
    made = remote.create("server:0", Batches)
    squares = remote.wait_all([made.square.future(number) for number in range(20)])
    pair = [made.inverse.future(number) for number in (0, 2)]
    short = [made.half.future(number) for number in (1, 2)]
    return {
        "squares": squares,
        "sizes": made.seen(),
        "description": made.square.__doc__,
        "failed": [caught(one.wait)[0] for one in pair],
        "left": [caught(lambda: made.leave(1))[:2] for _ in range(2)],
        "short": [caught(one.wait) for one in short],
        "kept": caught(lambda: made.square.remote(1)),
        "two items": caught(lambda: made.square(1, 2)),
    }


def refused():
    desk = remote.create("server:0", Desk)
    number = desk._lease.number
    session = remote.current()
    exchange = session.exchange

    def raw(kind, *value):
        """Call as somebody would who is one of us, but does not go by our rules."""
        return exchange.request("server:0", kind, value, what="raw", timeout_s=LIMIT_S).wait()

    def forged(argument, kind=FUNCTION, target="tests.dist.remote.services:hop"):
        """Send what no writer of ours writes."""
        given = exchange._mailbox, exchange._vocabulary, next(session.numbers)
        call = PendingCall(*given, "server:0", "forged", LIMIT_S)
        exchange._calls[call.number] = call
        text = f'[[], ["{target}", {{"t": [{argument}]}}, {{"d": []}}]]'.encode()
        route = _ROUTE.pack(kind, 0, call.number, 0)
        exchange._send("server:0", route + len(text).to_bytes(4, "little") + text, [])
        return call.wait()

    found = {
        "class": caught(lambda: remote.create("server:0", Unregistered)),
        "function": caught(lambda: remote.call("server:0", os.getpid)),
        "class there": caught(lambda: raw(CREATE, "os:_Environ", (), {})),
        "function there": caught(lambda: raw(FUNCTION, "os:getpid", (), {})),
        "named": caught(lambda: forged(json.dumps({"c": "posix:getpid"}))),
        "made": caught(lambda: forged(json.dumps({"o": ["builtins:eval", 1, ["1 + 1"], None, [], []]}))),
        "unknown": caught(lambda: forged(json.dumps({"X": []}))),
        "deep": caught(lambda: forged("[" * 100_000 + "]" * 100_000)),
        "missing": caught(lambda: forged(json.dumps({"T": ["float32", [1 << 40], 0, 0]}))),
        "nonsense": caught(lambda: forged("}")),
        "kind": caught(lambda: forged("1", kind=99)),
        "private": caught(lambda: raw(METHOD, *number, "_private", (), {})),
        "argument": caught(lambda: desk.echo(Unregistered())),
        "answer": caught(desk.unregistered),
        "right": caught(lambda: raw(FUNCTION, "tests.dist.remote.services:hop", ([], []), {})),
        "nobody": caught(lambda: remote.create("server:7", Desk)),
    }
    found["untouched"] = desk.add(0)
    return found


def listening():
    """Give the addresses that all workers of this machine's launch listen on, from the kernel."""
    return sorted(
        {address for name in remote.current().roles.names for address in remote.call(name, listened)()}
    )


@remote.function
def listened() -> list[str]:
    """Give this process's listening addresses as the kernel writes them."""
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(link.readlink()))
        except OSError:
            continue  # the one that lists the folder
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                addresses.append(fields[1].partition(":")[0])
    return addresses


CHECKS = (
    hops,
    own_calls,
    forked,
    described,
    failures,
    unsendable,
    dropped,
    references,
    gradients,
    overlap,
    patience,
    batches,
    refused,
    listening,
)


def check_all(session):
    """Make every check; the other trainer only serves."""
    if session.name != "trainer:0":
        return None
    return {check.__name__: check() for check in CHECKS}

"""What the workers of the tests offer each other."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import weakref

import torch
from torch import Tensor, nn

from paceline import remote
from paceline.remote.autograd import gradients_here

LIMIT_S = 120.0
"""Ends a wait that should have ended long before."""
alive: weakref.WeakSet[object] = weakref.WeakSet()
"""What was made for tests on this worker and is not freed."""


class Unregistered:
    pass


@remote.allow
class OwnError(Exception):
    """An exception of the user's, whose type is known on both sides."""


class StrangeError(Exception):
    """One that is not, and that cannot be made of its arguments."""

    def __init__(self, first, second):
        super().__init__(first)


class Thing:
    def __init__(self):
        alive.add(self)


@remote.service
class Desk:
    """Does small things."""

    def __init__(self, start: int = 0) -> None:
        alive.add(self)
        self.count = start
        self.released = threading.Event()

    def add(self, number: int = 1) -> int:
        """Add a number, and give the sum."""
        self.count += number
        return self.count

    def echo(self, value):
        return value

    def where(self) -> str:
        return remote.current().name

    def fail(self, kind: str) -> None:
        raise {"own": OwnError, "key": KeyError, "strange": lambda text: StrangeError(text, 2)}[kind](
            "no luck"
        )

    def unregistered(self):
        return [Unregistered()]

    def thing(self):
        return Thing()

    def unsendable(self):
        """Give what has the transport's words in its name."""
        return sqlite3.connect(":memory:")

    def leave(self) -> None:
        sys.exit(3)

    @staticmethod
    def twice(number: int) -> int:
        return 2 * number

    def stall(self) -> int:
        """Take until somebody releases it."""
        self.released.wait(LIMIT_S)
        return self.add()

    def release(self) -> None:
        self.released.set()

    @remote.idempotent
    def third_time(self) -> int:
        """Stall the first two times."""
        if self.add() < 3:
            self.released.wait(LIMIT_S)
        return self.count

    def _private(self) -> None:
        self.count = -1


@remote.service
class Keeper:
    """Keeps what it is given, and passes calls on."""

    def __init__(self):
        self.kept = None

    def keep(self, value):
        self.kept = value

    def add(self, number):
        return self.kept.add(number)

    def fail(self, kind):
        self.kept.fail(kind)

    def is_there(self):
        return self.kept.fetch() is not None

    def drop(self):
        self.kept = None


@remote.service
class Batches:
    """Gets items in lists."""

    def __init__(self):
        self.sizes: list[int] = []

    @remote.batched(max_size=8, max_wait_ms=50)
    def square(self, items):
        """Square a number."""
        self.sizes.append(len(items))
        return [item * item for item in items]

    @remote.batched(max_size=2, max_wait_ms=5000)
    def inverse(self, items):
        return [1 / item for item in items]

    @remote.batched(max_size=2, max_wait_ms=5000)
    def half(self, items):
        return items[:1]

    @remote.batched(max_size=1)
    def leave(self, items):
        sys.exit(3)

    def seen(self) -> list[int]:
        return self.sizes


def layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


@remote.service
class Layer:
    """A part of a model."""

    def __init__(self, seed: int) -> None:
        self.module = layer(seed)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def parameters(self):
        return [remote.reference(one) for one in self.module.parameters()]

    def state(self) -> list[Tensor]:
        return [one.detach() for one in self.module.parameters()]

    def gradients(self, identity: int) -> list[Tensor]:
        found = gradients_here(identity)
        return [found[one] for one in self.module.parameters()]


@remote.function
def hop(path: list[str], passed: list[str]) -> list[str]:
    """Pass by each worker of a path in turn."""
    passed = [*passed, remote.current().name]
    return remote.call(path[0], hop)(path[1:], passed) if path else passed


@remote.function
def pid() -> int:
    return os.getpid()


@remote.function
def count_alive() -> int:
    return len(alive)


@remote.function
def passes(desk: Desk, part: Layer, seed: int) -> bool:
    """Run passes over a layer that others use at the same time; say whether every gradient was this one's own."""
    torch.manual_seed(seed)
    same = []
    for inputs in torch.randn(4, 5, 8):
        desk.add()
        with remote.backward_pass() as pass_:
            pass_.backward(part.forward(inputs).square().sum())
            found = part.gradients(pass_.identity)
        alone = layer(1)
        alone(inputs).square().sum().backward()
        expected = [one.grad for one in alone.parameters()]
        same += [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]
    return len(same) == 8 and all(same)

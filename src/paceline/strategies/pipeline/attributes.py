"""Plain attributes that passes and losses set on a model (`self.level = ...`), which a task may keep and read them from.

A loss runs on the worker of the last stage. What the pass of that stage sets stands in the whole model before the loss goes on.
What the pass of another stage sets is on another worker: the name travels with what that stage hands on, and a read of it here
fails with one line.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any, NoReturn

from torch import Tensor

from paceline.errors import InputError
from paceline.strategies.pipeline.model_copy import Attributes
from paceline.strategies.pipeline.share import StageBody


class Elsewhere:
    """Stands for an attribute whose value another worker has: any use of it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, on another worker>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_read(self)

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise for an operation of torch that is given one."""
        found = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, cls)]
        _refuse_read(found[0] if found else cls("an attribute of the model"))


def _refuse_read(one: Elsewhere, *_: Any) -> NoReturn:
    raise InputError(
        f"{one._name} was set by the model's forward pass in another stage of the pipeline, on another worker, and is read here. "  # noqa: SLF001
        "Return it from forward with the output, or use another strategy."
    )


_ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift", "divmod",
)  # fmt: skip
_CONVERSIONS = (
    "neg", "pos", "abs", "invert", "bool", "int", "float", "complex", "index", "hash", "format", "str",
)  # fmt: skip
_MEMBERS = ("len", "iter", "next", "contains", "getitem", "setitem", "delitem", "call")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
for _one in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_CONVERSIONS, *_MEMBERS, *_COMPARISONS):
    setattr(Elsewhere, f"__{_one}__", _refuse_read)


class StageAttributes:
    """Follows the attributes through one stage: the loss up to its call, the pass, and the loss after it."""

    def __init__(self, body: StageBody, others: Collection[StageBody]) -> None:
        """`others` are all that run stages on this worker."""
        self._body, self._others = body, others
        running = {id(module) for module in body.modules()}
        self._running = Attributes(
            (name, module) for name, module in body.root.named_modules() if id(module) in running
        )
        self._whole = Attributes(body.original.named_modules())
        self._here = {id(module) for one in others for module in one.modules()}
        self._told: set[str] = set()
        """Names that a stage up to this one has set, each told once."""

    def begin(self) -> None:
        """Start with a loss."""
        self._whole.begin()

    def enter(self) -> None:
        """Start with the pass; what the loss has set before, alike on every worker, holds for it."""
        for name in self._whole.written():
            self._body.give_one(name)
        self._running.begin()

    def hand_on(self, came: bytes) -> bytes:
        """Return what the next stage has not heard yet."""
        new = sorted({*_unpacked(came), *self._running.written()} - self._told)
        self._told.update(new)
        return zlib.compress("\n".join(new).encode()) if new else b""

    def leave(self, came: bytes) -> None:
        """Continue with the loss: what this pass has set is there, and reads of what only other stages have set fail."""
        written = self._running.written()
        self._body.end()
        self._told.update(_unpacked(came))
        for name in self._told:
            path, _, key = name.rpartition(".")
            module = self._body.original.get_submodule(path)
            value = vars(self._body.root.get_submodule(path)).get(key)
            has_it = name in written and not (isinstance(value, Tensor) and value.is_meta)
            if id(module) not in self._here and not has_it:
                vars(module)[key] = Elsewhere(name)
        for one in self._others if self._told else ():
            one.keep_apart(Elsewhere)
        self._whole.begin()

    def end(self) -> None:
        """Raise for an attribute that the loss has set after its call of the model."""
        for name in self._whole.written():
            raise InputError(
                f"the loss changes {name} of the model after its call, but under pp it runs there on one worker alone: the "
                "model's parts on other workers would not learn of it. Hand it to the model's forward as an argument, or use "
                "another strategy."
            )


def _unpacked(names: bytes) -> list[str]:
    return zlib.decompress(names).decode().split("\n") if names else []

"""What docs/launching.md says about the function that is launched holds in the error messages too."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest

import paceline
from paceline.errors import InputError
from paceline.launch.job import FunctionCall, function_call, name_of
from paceline.training.by_value import Payload


class Trainer:
    """A program with a state of its own."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def fit(self, run: paceline.Run, value: int) -> int:
        return self.scale * value + run.world.rank

    def __call__(self, run: paceline.Run) -> int:
        return self.fit(run, 1)


def program(first: str, run: paceline.Run, *rest: Any, **named: Any) -> tuple[Any, ...]:
    return first, run.world.rank, rest, named


def test_a_function_that_a_worker_cannot_find_is_named_with_what_to_do() -> None:
    call = FunctionCall(module="json", name="late", main_path=None, payload=Payload(b""), options={})
    with pytest.raises(InputError, match=r"json has no late above .* Define the function above that call"):
        call.resolve(print)


def test_arguments_that_are_bound_to_a_function_go_with_it() -> None:
    bound = partial(program, "first", by_name=1, other=2)
    launched = paceline.launch(bound, 3, kwargs={"other": 4}, workers=2, strategy="ddp", threads=1)
    assert launched == tuple(("first", rank, (3,), {"by_name": 1, "other": 4}) for rank in (0, 1))
    assert paceline.launch(partial(Trainer(5).fit, value=2), workers=1, threads=1) == (10,)
    assert name_of(partial(Trainer(5).fit, value=2)) == "Trainer.fit"


def test_what_cannot_be_found_by_a_name_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a script: where there is none (pytest's processes are started with -c), code travels by value.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    for given, words in (
        (
            partial(lambda run: run),
            "<lambda> cannot be run in another process: it is defined inside a function",
        ),
        (
            Trainer(1),
            "a Trainer cannot be run in another process: it is an object, and workers find a function",
        ),
        (
            partial(program, lambda: 0),
            r"^argument 1 \(.*<lambda>\) of program cannot be sent .*no lambda.* or make it inside program\.$",
        ),
        (
            partial(program, choose=print, other=iter([len, lambda: 0].__iter__, 0)),
            r"^the argument other= \(callable_iterator\) of program cannot be sent",
        ),
    ):
        with pytest.raises(InputError, match=words):
            function_call(given, (), {}, {})

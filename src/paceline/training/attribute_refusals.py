"""Refusals of what a run has changed beside tensors and nobody can hand on, set back or find in a checkpoint."""

from __future__ import annotations

from typing import Any

from paceline.errors import InputError
from paceline.training.attribute_values import held_back, same, shown
from paceline.training.saved_attributes import ABSENT

Key = tuple[str, str]
"""The name of a module and of an attribute."""
KIND, HOOKS = "its class", "its hooks"


def check_alike(key: Key, now: Any, made: Any, who: str) -> None:
    """Raise where a group cannot go on: what was changed in the run is another here, and cannot be handed on."""
    name, attribute = key
    if same(now, made):
        return
    if attribute == KIND:
        what, instead = (
            "no module" if one == ABSENT else f"a {one.rpartition('.')[2]}" for one in (now, made)
        )
        raise InputError(
            f"{name} was replaced in the run and is {what} by now, but {who} {instead}, and the answer would be another. Make "
            "every module before the first step, and switch between them by an attribute that forward() reads."
        )
    if attribute == HOOKS:
        if ABSENT in (now, made):
            return  # the module is gone or new, which its class tells
        what, instead = (", ".join(_short(one) for one in hooks) or "none" for hooks in (now, made))
        raise InputError(
            f"{name} was given other hooks in the run (by now {what}), but {who} with {instead}, and the answer would be "
            "another. Register every hook before the first step, and switch it by an attribute of the module that it reads."
        )
    function = held_back(now)
    if function is not None:
        raise InputError(
            f"{attribute} of {name} was set in the run to {function.name}, which no other process can look up by name, but {who} "
            f"{'without it' if made == ABSENT else f'with {shown(made)}'}, and the answer would be another. Define the function "
            "at the top of a module; or set it before the first step, and switch it by a plain attribute."
        )


def check_set_back(key: Key, was: Any, now: Any, number: int) -> None:
    """Raise where what was changed in the run since a step cannot be undone."""
    name, attribute = key
    if attribute == KIND:
        what, made = ("no module" if one == ABSENT else f"a {one.rpartition('.')[2]}" for one in (now, was))
        raise InputError(
            f"{name} was replaced in the run and is {what} by now, but the run goes back to step {number}, where it was {made}, "
            "and the answer would be another. Make every module before the first step, and switch between them by an attribute "
            "that forward() reads."
        )
    if attribute == HOOKS and ABSENT not in (was, now):
        what, made = (", ".join(_short(one) for one in hooks) or "none" for hooks in (now, was))
        raise InputError(
            f"{name} was given other hooks in the run (by now {what}), but the run goes back to step {number}, where it had "
            f"{made}, and the answer would be another. Register every hook before the first step, and switch it by an attribute "
            "of the module that it reads."
        )
    function = held_back(was)
    if function is not None:
        raise InputError(
            f"{attribute} of {name} was set in the run to {'nothing' if now == ABSENT else shown(now)}, but the run goes back to "
            f"step {number}, where it was {function.name}, which cannot be looked up by name. Define the function at the top of "
            "a module."
        )


def unmade(key: Key, value: Any, beside: list[str]) -> str:
    """Return the note about what a run had set and a start has not; what was made `beside` it the start has as it makes it."""
    name, attribute = key
    along = f" (along with {', '.join(beside)})" if beside else ""
    if attribute == HOOKS and value != ABSENT:
        what, became = f"the hooks of {name}{along} were", ", ".join(_short(one) for one in value) or "none"
    else:
        what = f"{attribute} of {name}{along} was"
        became = "an object" if value == ABSENT else shown(value)
    was = f"{what} set in the run to what no checkpoint holds ({became})"
    if attribute == HOOKS and not value:
        was = f"the hooks of {name} were taken away in the run"
    return (
        f"{was}, and this start has not set it in its first step: where the passes use it, the weights will not be those of a "
        "run that was never left. Make it before the first step, or save it: state() of the task, run.register in a loop."
    )


def used(key: Key) -> str:
    """Return the note about a generator, an iterator or a table that a run has used, and a start has from its beginning."""
    return (
        f"{key[1]} of {key[0]} was used or changed in the run, and is in no checkpoint: this start has it from its "
        "beginning, and where the passes use what it gives, "
        "the weights will not be those of a run that was never left. Save its state: state() of the "
        "task, run.register in a loop."
    )


def _short(hook: str) -> str:
    """Return the table and the name of a hook, without its code."""
    return " ".join(hook.split()[:2])

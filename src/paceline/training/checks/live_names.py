"""Finds what a suspended generator goes on with: variables that its code reads again before it sets them anew."""

from __future__ import annotations

import dis
import functools
import re
from types import CodeType

_ENDS = ("RETURN", "RAISE", "RERAISE")
_ALWAYS = re.compile(r"JUMP_(FORWARD|BACKWARD|ABSOLUTE|BACKWARD_NO_INTERRUPT)")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_NO_WORK = ("RESUME", "NOP", "CACHE", "EXTENDED_ARG")
_DROPS = ("POP_TOP", "JUMP", "SEND", "YIELD", "END_SEND")
"""What follows a `yield` whose value nobody takes, or one that hands it to another generator."""
_ACCESS = re.compile("LOAD|STORE|DELETE")


@functools.lru_cache(maxsize=256)
def live_names(code: CodeType, at: int) -> frozenset[str]:
    """Return the variables of its own that code reads behind the instruction `at`, with the values that they have there."""
    steps = list(dis.get_instructions(code))
    places = {step.offset: place for place, step in enumerate(steps)}
    if at not in places:
        return frozenset()
    own = set(code.co_varnames).difference(code.co_cellvars)
    return frozenset(name for name in own if _is_read(name, steps, places, places[at] + 1))


@functools.lru_cache(maxsize=256)
def receiver(code: CodeType, at: int) -> str | None:
    """Return which variable takes what is sent to the instruction `at`: "" for anything else that does, None for nothing."""
    behind = (step for step in dis.get_instructions(code) if step.offset > at)
    step = next((one for one in behind if one.opname not in _NO_WORK), None)
    if step is None or step.opname.startswith(_DROPS):
        return None
    name = step.argval[0] if isinstance(step.argval, tuple) else step.argval
    return name if step.opname.startswith("STORE_FAST") else ""


def _is_read(name: str, steps: list[dis.Instruction], places: dict[int, int], first: int) -> bool:
    """Return whether a way through the code from its `first` step reads a variable before it is set."""
    waiting, seen = [first], set()
    while waiting:
        place = waiting.pop()
        if place in seen or place >= len(steps):
            continue
        seen.add(place)
        step = steps[place]
        access = _access(name, step)
        if access == "LOAD":
            return True
        if access is not None:
            continue
        if step.opcode in _JUMPS and step.argval in places:
            waiting.append(places[step.argval])
        if not step.opname.startswith(_ENDS) and not _ALWAYS.fullmatch(step.opname):
            waiting.append(place + 1)
    return False


def _access(name: str, step: dis.Instruction) -> str | None:
    """Return what a step does first with a variable; one step may read or set two."""
    if "_FAST" not in step.opname:
        return None
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    pairs = zip(_ACCESS.findall(step.opname), names, strict=False)
    return next((kind for kind, one in pairs if one == name), None)

"""What code looks up by name, told apart: globals, attributes, and what it imports."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

_OF_ATTRIBUTES = ("IMPORT_FROM", "LOAD_ATTR", "LOAD_METHOD")
_BY_TEXT = ("getattr", "hasattr")
_ALL_OF_IT = frozenset(("vars", "dir", "asdict", "astuple", "replace", "copy", "deepcopy", "attrgetter"))
"""What looks at attributes without naming them."""


@dataclass(frozen=True)
class Names:
    """The names that code looks up, functions inside of it included."""

    globals: frozenset[str]
    attributes: frozenset[str]
    imported: frozenset[str]
    any_attribute: bool
    """Whether it also looks up attributes whose names are not in it."""


def names_in(code: CodeType) -> set[str]:
    """Return the names that code looks up, functions inside of it included, whatever they are of."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(names_in, inner))


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """Return what code looks up."""
    found, attributes, imported = set[str](), set[str](), set[str]()
    any_attribute, waiting = False, [code]
    while waiting:
        one = waiting.pop()
        waiting += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
        asked: bool | None = None
        """Whether the name that getattr is to look up has come; None outside of its arguments."""
        for step in dis.get_instructions(one):
            name = step.argval
            if step.opname.startswith("CALL") and asked is not None:
                any_attribute, asked = any_attribute or not asked, None
            elif step.opname == "LOAD_CONST" and asked is False and isinstance(name, str):
                attributes.add(name)
                asked = True
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                found.add(name)
                asked = False if name in _BY_TEXT else asked
            elif step.opname == "IMPORT_NAME":
                imported.add(name)
            elif step.opname in _OF_ATTRIBUTES or step.opname.startswith("LOAD_SUPER"):
                attributes.add(name)
    any_attribute = any_attribute or bool(_ALL_OF_IT & (found | attributes)) or "__dict__" in attributes
    return Names(frozenset(found), frozenset(attributes), frozenset(imported), any_attribute)

"""What names are told apart by in CPython's bytecode."""

from __future__ import annotations

from typing import Any

from paceline.compat.code_names import names_in, names_of
from tests.unit.compat.contracts import leans_on


def looks(given: Any) -> Any:
    import json.decoder

    def inner() -> Any:
        return GLOBAL.attribute, getattr(given, "by_text"), super  # noqa: B009

    with given.entered:
        return [one.member for one in given], json, inner


GLOBAL: Any = None


@leans_on("dis.get_instructions")
def test_names_by_what_they_are_of() -> None:
    names = names_of(looks.__code__)
    assert {"GLOBAL", "getattr", "super"} <= names.globals
    assert {"attribute", "by_text", "entered", "member"} <= names.attributes
    assert not names.globals & names.attributes
    assert "json.decoder" in names.imported
    assert not names.any_attribute
    assert {"GLOBAL", "attribute", "entered", "json.decoder"} <= names_in(looks.__code__)


@leans_on("dis.get_instructions")
def test_attributes_by_names_that_are_nowhere() -> None:
    assert names_of((lambda one, name: getattr(one, name).more).__code__).any_attribute
    assert names_of((lambda one: vars(one).more).__code__).any_attribute

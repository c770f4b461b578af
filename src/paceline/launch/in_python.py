"""What `paceline.launch` takes as keywords, and its errors in Python's words: `workers=2` where a shell has `--workers 2`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from paceline import strategies
from paceline.errors import InputError, UnknownNameError
from paceline.option_fields import Options, shown
from paceline.strategies.tuning import Tuning, check_use
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec

_FILLED_IN = ("shards_from",)
_VALUE = r"'[^']*'|-?[0-9][\w.:]*|[A-Z][A-Z:]*\b|[\w-]+(?:=[\w,=-]+)|host:port|%s"
_LETTERS = r"--(no-)?([a-z][a-z-]*[a-z])"


def keywords() -> dict[str, tuple[Field[Any], Any]]:
    """Return the keywords, each with its field and its type: the options of every strategy stand beside the common ones."""
    found: dict[str, tuple[Field[Any], Any]] = {}
    kinds: tuple[type[Options], ...] = (RunOptions, Tuning)
    for kind in kinds:
        hints = get_type_hints(kind)
        found |= {one.name: (one, hints[one.name]) for one in fields(kind) if one.name not in _FILLED_IN}  # type: ignore[arg-type]
    return found


def run_options(given: Mapping[str, Any]) -> RunOptions:
    """Make the options of a run from keywords; an option of one strategy may stand beside the others, or in `tuning`."""
    known = keywords()
    for name in given:
        if name not in known:
            raise UnknownNameError("option", name, known)
    own = {one.name for one in fields(Tuning)}
    flat = {name: value for name, value in given.items() if name in own}
    rest = {name: value for name, value in given.items() if name not in own}
    if flat:
        before = rest.get("tuning", {})
        nested = before if isinstance(before, Mapping) else {one: getattr(before, one) for one in own}
        rest["tuning"] = Tuning.made({**nested, **flat}, "option of a strategy")
        chosen = strategies.choice(str(rest.get("strategy", "ddp")))
        check_use(flat, {str(chosen): (chosen.name, dict(chosen.sizes))})
    return RunOptions.made(rest)


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return what a function takes, with the keywords in the place of its `**options`."""
    own = inspect.signature(function, eval_str=True)
    kept = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default={} if one.default is MISSING else one.default,
            annotation=hint,
        )
        for name, (one, hint) in keywords().items()
        if name not in own.parameters
    ]
    return own.replace(parameters=[*kept, *more])


@contextmanager
def errors_in_keywords() -> Iterator[None]:
    """Raise what a user gave wrong in the words that a call in Python has."""
    try:
        yield
    except InputError as error:
        text = in_keywords(str(error))
        if text == str(error):
            raise
        made = type(error).__new__(type(error))
        Exception.__init__(made, text)
        vars(made).update(vars(error))  # its notes
        raise made from None


def in_keywords(text: str) -> str:
    """Return a message with options as a call in Python has them."""
    known = _names()

    def said(found: re.Match[str]) -> str:
        off, name, values = found[1], found[2].replace("-", "_"), found[3]
        if name not in known:
            return found[0]
        alone = values is None and re.match(r" (is|are)\b", text[found.end() :])
        if known[name] is bool and not alone:
            return f"{name}={not off}" + (f" {values}" if values else "")
        if values is None:
            return name if alone else f"{name}="
        return f"{name}={re.sub(one, lambda each: _quoted(each[0]), values)}"

    one = _VALUE % "|".join(sorted(map(re.escape, _texts()), key=len, reverse=True))
    several = rf"(?:{one})(?:, (?:{one}))*(?: or (?:{one}))?"
    return re.sub(rf"{_LETTERS}(?: ({several})(?![\w=-]))?", said, text)


def _quoted(value: str) -> str:
    """Return a value as Python has it: a text in quotes; a word in capitals stands for one."""
    plain = value.startswith("'") or value.isupper() or re.fullmatch(r"-?[0-9.]+", value)
    return value if plain else repr(value)


def _names() -> dict[str, Any]:
    return {name: hint for name, (_, hint) in keywords().items()} | {
        "threads": int,
        **{one.name: int for one in fields(TrainSpec) if shown(one)},
    }


def _texts() -> set[str]:
    """Return every text that some option may be."""
    found = {text for one, _ in keywords().values() if (about := shown(one)) for text in about.names}
    return found | set(strategies.STRATEGIES)

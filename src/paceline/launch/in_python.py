"""What `paceline.launch` takes as keywords, and its errors in Python's words: `workers=2` where a shell has `--workers 2`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, fields
from typing import Any, get_type_hints

from paceline import strategies
from paceline.errors import InputError, UnknownNameError
from paceline.launch.own_frames import hide_own_frames
from paceline.launch.resumed import options_over
from paceline.option_fields import Options, flag, known_options, shown
from paceline.strategies.tuning import Tuning
from paceline.training import folder
from paceline.training.options import RunOptions
from paceline.training.spec import OVERRIDES, TrainSpec

_FILLED_IN = ("shards_from",)
_BESIDE = ("threads", "kwargs")
"""Keywords that are no options of a run."""
_IN_STEPS = "run.steps(data, {said}) in a loop of your own, or to the Task as an attribute"
_OF_TRAINING = {
    "batch_size": _IN_STEPS,
    "epochs": _IN_STEPS,
    "max_grad_norm": f"step.apply({{said}}) or {_IN_STEPS}",
    "steps": "run.steps(data, {said}) in a loop of your own; for a Task it is an option of paceline train",
    "eval_every": "the loop of your own, which calls run.evaluate when it likes, or to the Task as an attribute",
    "predict": "run.predict(data, function, out=FILE) in a loop of your own; for a Task it is an option of paceline train",
    "horizon": "the schedule that a loop of your own makes; for a Task it is an option of paceline train",
}
"""Options of `paceline train` that a function has a place of its own for."""
OF_STARTING = ("on", "hosts", "ssh", "resources")
"""Options of `paceline train` that start its command anew: there is none to start in the midst of a script."""
_VALUE = r"'[^']*'|-?[0-9][\w.:]*|[A-Z][A-Z:]*\b|[\w-]+=[\w=-]+(?:,[\w-]+=[\w=-]+)*|host:port|%s"
_LETTERS = r"--(no-)?([a-z][a-z-]*[a-z])"


OF_RUN: tuple[type[Options], ...] = (RunOptions, Tuning)
OF_TASK = (*OF_RUN, TrainSpec)
"""Whose fields are keywords: of a launch, and of a training."""


def keywords(kinds: tuple[type[Options], ...] = OF_RUN) -> dict[str, tuple[Field[Any], Any]]:
    """Return the keywords, each with its field and its type: the options of every strategy stand beside the common ones."""
    found: dict[str, tuple[Field[Any], Any]] = {}
    for kind in kinds:
        hints = get_type_hints(kind)
        plain = fields(kind)  # type: ignore[arg-type]
        found |= {
            one.name: (one, hints[one.name])
            for one in plain
            if one.name not in _FILLED_IN and (kind is not TrainSpec or shown(one))
        }
    return found


def run_options(given: Mapping[str, Any]) -> tuple[RunOptions, Mapping[str, Any], tuple[str, ...]]:
    """Return the options of a run by keywords, the spec of the run that is resumed, and what is otherwise than it was there.

    An option of one strategy may stand beside the others, or in `tuning`; what a resumed run had and no keyword says stays.
    """
    known = keywords()
    for name in given:
        if name not in known:
            if name in _OF_TRAINING:
                place = _OF_TRAINING[name].format(said=f"{name}={given[name]!r:.40}")
                raise InputError(f"{name} is no option of launch. It belongs to {place}.")
            if name in OF_STARTING:
                raise InputError(
                    f"{name} is no option of launch: it would start this script anew for each worker. Start the script with "
                    "torchrun, mpirun or srun, which launch joins by itself, or give a Task to paceline train, which has it."
                )
            raise UnknownNameError("option", name, [*known, *_BESIDE])
    said = read_keywords(given)
    out = said.get("out")
    before = folder.read_spec(out) if said.get("resume") and out is not None else {}
    had = before.get("options", {})
    if isinstance(given.get("tuning"), Tuning):  # it says every one of them
        had = {**had, "tuning": {}}
    overrides = {name: had[name] for name in OVERRIDES if name in had} | before.get("overrides", {})
    made, notes = options_over(said, {**before, "options": had, "overrides": overrides}, out)
    return made, before, notes


def read_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by keywords as they are kept, those of single strategies beside the others."""
    own, of_task = known_options(Tuning), known_options(TrainSpec)
    said = RunOptions.read({name: value for name, value in given.items() if name not in own})
    said |= TrainSpec.read({name: value for name, value in given.items() if name in of_task})
    flat = {name: value for name, value in given.items() if name in own}
    return said | _tuning(said.pop("tuning", {}), flat)


def _tuning(nested: Any, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of single strategies that were said, in `tuning` or beside it."""
    _ = RunOptions(tuning=nested)  # which refuses what is none
    if isinstance(nested, Tuning):
        defaults = known_options(Tuning)
        nested = {name: value for name, value in asdict(nested).items() if value != defaults[name]}
    twice = next((name for name in flat if name in nested and nested[name] != flat[name]), None)
    if twice is not None:
        raise InputError(
            f"{flag(twice)} is {flat[twice]!r}, and {nested[twice]!r} in tuning. Give it in one place."
        )
    return {**nested, **flat}


def signature(
    function: Callable[..., Any], kinds: tuple[type[Options], ...] = OF_RUN, left_out: Collection[str] = ()
) -> inspect.Signature:
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
        for name, (one, hint) in keywords(kinds).items()
        if name not in own.parameters and name not in left_out
    ]
    return own.replace(parameters=[*kept, *more])


@contextmanager
def errors_in_keywords(words: Callable[[str], str] | None = None) -> Iterator[None]:
    """Raise what a user gave wrong in the words that a call in Python has."""
    try:
        yield
    except InputError as error:
        hide_own_frames()
        text = (words or in_keywords)(str(error))
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


def in_words(text: str) -> str:
    """Return a message about a Task as a call has it: the arguments of its constructor, too."""
    return in_keywords(
        re.sub(r"--set ([A-Za-z_]\w*)=([^\s:]+?)(?=[.,:]?(?:\s|$))", r"settings={'\1': \2}", text)
    )


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

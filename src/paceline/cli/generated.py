"""Makes the options of a command from the fields of classes of options, and shows them in groups."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from paceline.option_fields import COMMON, GROUPS, REPEATED, Options, flag, folder, shown

Given = dict[str, Any]
"""What the command line said, by name; an option that was not given is not in it."""
GIVEN = "given"
ARGUMENTS = "Arguments"


def takes(
    *kinds: type[Options],
    only: tuple[str, ...] = (),
    whole: tuple[type[Options], ...] = (),
    words: dict[str, str] | None = None,
    hidden: tuple[str, ...] = (),
    short: dict[str, str] | None = None,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that adds the options of some classes, or `only` some of them beside all of the `whole` ones, to a
    command, which gets them as `given`.

    `words` replaces what the help says of some, their defaults included; `hidden` are not in it; `short` has a
    letter for some. An option that the command
    declares itself is its own affair.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        own = inspect.signature(command, eval_str=True)
        mine = [one for one in own.parameters.values() if one.name != GIVEN]
        declared = {one.name.rstrip("_") for one in mine}
        made = [
            _parameter(one, hints[one.name], words or {}, hidden, (short or {}).get(one.name))
            for kind in (*kinds, *whole)
            for hints in [typing.get_type_hints(kind)]
            for one in fields(kind)  # type: ignore[arg-type]
            if shown(one) and one.name not in declared and (not only or kind in whole or one.name in only)
        ]

        def called(**values: Any) -> int:
            found = {one.name.rstrip("_"): _joined(values.pop(one.name)) for one in made}
            return command(
                **values, given={name: value for name, value in found.items() if value is not None}
            )

        every = [*made, *mine]
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in every]
        )
        called.__annotations__ = {one.name: one.annotation for one in every}
        return called

    return decorate


def _parameter(
    one: Field[Any], hint: Any, words: dict[str, str], hidden: tuple[str, ...], short: str | None
) -> inspect.Parameter:
    """Return a field as a parameter of a command; None stands for one that was not given."""
    about, name, value = shown(one), flag(one.name), _type(hint)
    if about is None:
        raise TypeError(f"{one.name} is no option of the command line")
    reads: dict[str, Any] = {"parser": _folder(name)} if value is Path else {}
    made: Any = typer.Option(
        *_spellings(name, switch=value is bool, short=short),
        help=words.get(one.name) or about.words + _default(one),
        rich_help_panel=about.group,
        metavar=about.metavar,
        hidden=one.name in hidden,
        show_default=False,
        **reads,
    )
    # With an underscore after it: `compile` is a name of Python's own.
    kind = inspect.Parameter.KEYWORD_ONLY
    value = list[str] if REPEATED in about.marks else value
    return inspect.Parameter(f"{one.name}_", kind, default=None, annotation=Annotated[value | None, made])


def _joined(value: Any) -> Any:
    """Return what was given several times as one text; None where it was not given."""
    return (",".join(value) or None) if isinstance(value, list) else value


def _spellings(name: str, *, switch: bool, short: str | None) -> list[str]:
    """Return how an option is written; one that is a negation already has none of its own."""
    plain = f"{name}/--no-{name[2:]}" if switch and not name.startswith("--no-") else name
    return [plain] if short is None else [short, plain]


def own(kind: type[Options], given: Given) -> Given:
    """Return those of the options that a command was given which belong to a class of options."""
    return {one.name: given[one.name] for one in fields(kind) if one.name in given}  # type: ignore[arg-type]


def _folder(name: str) -> Callable[[str], Path]:
    return lambda text: folder(name, text)


def _type(hint: Any) -> Any:
    """Return the type that a text of the command line is read as."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [one for one in (typing.get_args(hint) if union else (hint,)) if one is not type(None)]
    return str if str in kinds else kinds[0]


def _default(one: Field[Any]) -> str:
    about, value = shown(one), one.default
    text = about.default if about is not None else None
    if text is None:
        quiet = value is MISSING or value is None or value is False
        text = "" if quiet else "yes" if value is True else f"{value}"
    return f" Default: {text}." if text else ""


class GroupedCommand(TyperCommand):
    """A command whose help shows its options in groups: common ones first, those of single strategies last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                plain = ARGUMENTS if one.param_type_name == "argument" else COMMON
                rows.setdefault(getattr(one, "rich_help_panel", None) or plain, []).append(record)
        order = [ARGUMENTS, *GROUPS]
        for group in [*(one for one in order if one in rows), *sorted(rows.keys() - set(order))]:
            with formatter.section(group):
                formatter.write_dl(rows[group])

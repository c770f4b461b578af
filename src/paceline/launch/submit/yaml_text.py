"""Writes mappings, lists, texts and numbers as YAML, so that manifests need no library."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
"""Texts that YAML would read as something else."""


def write(value: dict[str, Any], indent: int = 0) -> str:
    """Return a mapping as YAML in block style."""
    return "".join(_entry(f"{' ' * indent}{_scalar(key)}:", each, indent) for key, each in value.items())


def _entry(head: str, value: Any, indent: int) -> str:
    if isinstance(value, dict) and value:
        return f"{head}\n{write(value, indent + 2)}"
    if isinstance(value, list) and value:
        return f"{head}\n" + "".join(_item(one, indent) for one in value)
    return f"{head} {_block(value, indent)}\n"


def _item(value: Any, indent: int) -> str:
    lead = " " * indent + "- "
    if isinstance(value, dict) and value:
        return lead + write(value, indent + 2).removeprefix(" " * (indent + 2))
    return f"{lead}{_block(value, indent)}\n"


def _block(value: Any, indent: int) -> str:
    """Return a text of several lines as such; anything else as a scalar."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"[^\s][^\r\t]*\n", value)
        and not value.endswith("\n\n")
        and "\n" in value[:-1]
        # Else YAML breaks lines where there are none.
        and all(line.isprintable() for line in value.split("\n"))
    ):
        lines = value[:-1].split("\n")
        return "\n".join(["|", *(" " * (indent + 2) + line if line else "" for line in lines)])
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    written = json.dumps(value, ensure_ascii=False)  # YAML reads what JSON writes, but for halves of a sign
    return "".join(sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in written)

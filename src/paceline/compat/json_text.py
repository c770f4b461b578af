"""JSON as bytes, without making an encoder anew for every text, which takes longer than to write a small one.

Leans on `json.encoder.c_make_encoder`, which `JSONEncoder.iterencode` calls each time with these very arguments.
"""

from __future__ import annotations

import json
from json import encoder
from typing import Any


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is nothing that JSON knows")


def _made() -> Any:
    make = getattr(encoder, "c_make_encoder", None)
    if make is None:  # not the interpreter that we know
        plain = json.JSONEncoder(check_circular=False, separators=(",", ":"))
        return lambda value, _: plain.encode(value)
    return make(None, _refuse, encoder.encode_basestring_ascii, None, ":", ",", False, False, True)


_encoder = _made()


def encode(value: Any) -> bytes:
    """Return a value of lists, dicts, strings and numbers as JSON, without blanks."""
    return "".join(_encoder(value, 0)).encode("ascii")

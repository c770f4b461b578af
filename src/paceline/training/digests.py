"""Short digests that tell values apart by what is in them: text, code, tensors and arrays. Imports no torch."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import CodeType
from typing import Any


def digest(content: str | bytes | memoryview) -> str:
    """Return a short hash."""
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return hashlib.sha256(raw).hexdigest()[:16]


def code_digest(code: CodeType) -> str:
    """Return the digest of a function's code: of what a file defines its line, for pytest and others rewrite what they import."""
    if not code.co_name.startswith("<") and not code.co_filename.startswith("<"):
        return digest(f"{Path(code.co_filename).name} {code.co_name} {code.co_firstlineno}")
    constants = [code_digest(one) if isinstance(one, CodeType) else _constant(one) for one in code.co_consts]
    return digest(repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)))


def _constant(value: Any) -> str:
    if isinstance(value, tuple | frozenset):
        inside = [_constant(one) for one in value]
        return repr(inside if isinstance(value, tuple) else sorted(inside))
    return repr(value)


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor of torch's or an array of numpy's."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kinds = [getattr(torch, "Tensor", None), getattr(numpy, "ndarray", None)]
    return any(kind is not None and issubclass(type(value), kind) for kind in kinds)


def array_digest(value: Any) -> str:
    """Return the digest of a tensor's or array's elements; empty where they are not in this machine's memory."""
    try:
        if type(value).__module__.partition(".")[0] == "torch":
            if value.device.type != "cpu":
                return ""
            value = value.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
        return "" if value.dtype.hasobject else digest(value.tobytes())
    except Exception:  # noqa: BLE001  (sparse, quantized, fake, of a mode that forbids it)
        return ""

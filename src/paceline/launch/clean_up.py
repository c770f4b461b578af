"""Refuses a call of `launch` around which a script cleans up without a guard: every worker would do so, too.

A worker imports the script as far as that call and leaves it there by an exception, so what stands in a `finally` around the
call, or under an `except` that catches everything, runs in each of them, while the others train.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from paceline.compat.libraries import is_library
from paceline.errors import InputError

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def check_call(caller: FrameType) -> None:
    """Raise where workers that import the script would run clean-up on their way out of it; `caller` is what calls `launch`."""
    frames = _way_from_script(caller)
    if not frames or _is_guarded(frames[-1]):
        return
    for frame in frames:
        for line, word in _clean_up(frame):
            raise InputError(
                f"{frame.f_code.co_filename}, line {line}: what stands under this `{word}` would run in every worker, too: each "
                "imports the script as far as its call of paceline.launch, and leaves it there. Put the call, with all that is "
                'around it, under `if __name__ == "__main__":`.'
            )


def _way_from_script(caller: FrameType) -> list[FrameType]:
    """Return the frames from a call to the top of the script; none where the script did not come there by itself."""
    frames: list[FrameType] = []
    frame: FrameType | None = caller
    while frame is not None:
        frames.append(frame)
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frames
        frame = frame.f_back
    return []


def _is_guarded(frame: FrameType) -> bool:
    """Return whether the line that a script is at stands under a condition on its `__name__`."""
    return any(
        isinstance(node, ast.If)
        and _has_line(node.body, frame.f_lineno)
        and any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test))
        for node in _statements(frame)
    )


def _clean_up(frame: FrameType) -> Iterator[tuple[int, str]]:
    """Return the line and the word of each block that an exception from the line a frame is at would run."""
    if is_library(str(Path(frame.f_code.co_filename).parent)):
        return
    for node in _statements(frame):
        if not isinstance(node, ast.Try | ast.TryStar):
            continue
        handled = [one for handler in node.handlers for one in handler.body]
        if node.finalbody and _has_line([*node.body, *handled, *node.orelse], frame.f_lineno):
            yield node.finalbody[0].lineno, "finally"
        if _has_line(node.body, frame.f_lineno):
            yield from ((one.lineno, "except") for one in node.handlers if _catches_everything(one))


def _statements(frame: FrameType) -> Iterator[ast.AST]:
    """Return what a frame's own code consists of, as far as its source is there; not what functions in it consist of."""
    code = frame.f_code
    try:
        tree = ast.parse(Path(code.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    roots: list[ast.AST] = [tree]
    if code.co_name != "<module>":
        roots = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and code.co_firstlineno == min(one.lineno for one in (node, *node.decorator_list))
        ]
    left = [child for root in roots for child in ast.iter_child_nodes(root)]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, _SCOPES):
            left.extend(ast.iter_child_nodes(node))


def _has_line(statements: Iterable[ast.stmt], line: int) -> bool:
    return any(one.lineno <= line <= (one.end_lineno or one.lineno) for one in statements)


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return any(isinstance(one, ast.Name) and one.id == "BaseException" for one in ast.walk(handler.type))

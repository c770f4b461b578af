"""The closing summary of a run: what was trained, how, how well, how fast, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from paceline.observe import formats
from paceline.observe.sentences import promise


def render(result: Mapping[str, Any]) -> Group:
    """Lay the result of a run out as a rich renderable; what it does not hold is left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(result):
        table.add_row(label, value)
    title = Text(f"{result['task']} is trained", style="bold")
    parts: list[RenderableType] = [
        Text(),
        Rule(title, align="left", style="bright_black"),
        Padding(table, (0, 0, 0, 1)),
    ]
    if result.get("out"):
        parts += [Text(), Text(" next", style="dim"), *(_command(each) for each in _next(result))]
    return Group(*parts)


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print the summary; uncropped, so that a command longer than the screen stays whole."""
    Console(file=stream, highlight=False).print(render(result), crop=False)


def _rows(result: Mapping[str, Any]) -> list[tuple[str, Text]]:
    rows = [("trained", _what(result)), ("exactness", _exactness(result)), ("work", _work(result))]
    if result.get("loss") is not None:
        rows.append(("train loss", Text(formats.number(result["loss"]), style="bold")))
    for name, value in (result.get("metrics") or {}).items():
        rows.append((f"eval {name.replace('_', ' ')}", Text(formats.metric(name, value), style="bold green")))
    rows.append(("time", _time(result)))
    if result.get("step_ms_p50") is not None:
        slow = result.get("step_ms_p95")
        tail = f", p95 {formats.milliseconds(slow)}" if slow is not None else ""
        rows.append(("step", Text(f"p50 {formats.milliseconds(result['step_ms_p50'])}{tail}")))
    if result.get("recoveries") or result.get("restarts") or result.get("errors"):
        rows.append(("failures", Text(_failures(result), style="yellow")))
    if result.get("weights_sha256"):
        rows.append(("weights", Text(f"sha256 {result['weights_sha256'][:16]}…", style="dim")))
    if result.get("out"):
        rows.append(("folder", Text(str(result["out"]))))
    return [(label, value) for label, value in rows if value.plain]


def _what(result: Mapping[str, Any]) -> Text:
    parameters = result.get("parameters")
    text = Text(f"{formats.plural(parameters, 'parameter')}, " if parameters is not None else "")
    workers, shards = result.get("workers", 1), result.get("shards")
    text.append(f"{result.get('strategy', 'single')} on {formats.plural(workers, 'worker')}")
    if result.get("workers_at_start", workers) != workers:
        text.append(f" (of {formats.count(result['workers_at_start'])} at the start)")
    if shards is not None:
        text.append(f", {formats.plural(shards, 'shard')}")
    return text


def _exactness(result: Mapping[str, Any]) -> Text:
    level = result.get("exactness")
    if not level:
        return Text()
    meaning = promise(level, result.get("shards"), result.get("shards_from"))
    return Text(level, style="bold").append(f": {meaning}" if meaning else "", style="not bold")


def _work(result: Mapping[str, Any]) -> Text:
    return Text(f"{formats.plural(result['steps'], 'step')}, {formats.plural(result['samples'], 'sample')}")


def _time(result: Mapping[str, Any]) -> Text:
    seconds = result.get("wall_s")
    if seconds is None:
        return Text()
    text = Text(formats.duration(seconds))
    if seconds > 0:
        # A resumed run took its earlier samples in somebody else's time.
        new = result.get("new_samples", result["samples"])
        text.append(f", {formats.count(new / seconds)} samples/s over all")
    return text


def _failures(result: Mapping[str, Any]) -> str:
    recoveries = result.get("recoveries") or []
    parts = []
    if recoveries:
        seconds = sum(each["seconds"] for each in recoveries)
        times = formats.plural(len(recoveries), "recovery", "recoveries")
        parts.append(f"{times} in {formats.duration(seconds)}")
    for error in result.get("errors") or []:
        step = "" if error["step"] is None else f" in step {formats.count(error['step'])}"
        parts.append(f"rank {error['rank']} failed{step} ({error['message']}) and was tried once more")
    if result.get("restarts"):
        parts.append(formats.plural(result["restarts"], "restart"))
    return ", ".join(parts)


def _next(result: Mapping[str, Any]) -> list[list[str]]:
    out = str(result["out"])
    task = str(result.get("typed") or result["task"])
    more = _more_steps(result)
    train = ["paceline", "train", task, "--resume", "--out", out, "--steps", str(more)]
    return [*([train] if more is not None else []), ["paceline", "export", out]]


def _more_steps(result: Mapping[str, Any]) -> int | None:
    """Return where to go on to: --steps counts from the beginning; None where a schedule has come to its end."""
    horizon, taken = result.get("horizon"), int(result["steps"])
    if horizon is None:
        return 2 * taken
    return int(horizon) if taken < horizon else None


def _command(words: list[str]) -> Text:
    # Longer than the screen, a command runs on: a line break inside it would spoil copying it.
    return Text("   " + shlex.join(words), style="cyan", no_wrap=True, overflow="ignore")

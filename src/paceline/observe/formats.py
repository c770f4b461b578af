"""Numbers the way people read them: 1,437 samples, 4.2 ms, 2 min 05 s, 98.61 %."""

from __future__ import annotations

import math


def count(value: float) -> str:
    """Write a whole number with thousands marked; from ten million on, in millions and up: 124.4 M."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 10_000_000:
        return f"{round(value):,}"
    scaled, unit = float(value), ""
    for unit in ("k", "M", "G", "T", "P", "E"):  # noqa: B007
        scaled /= 1000
        if abs(scaled) < 999.95:
            break
    return f"{scaled:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Write a time in the two units that matter."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 9.95:
        return f"{seconds:.1f} s" if seconds >= 0.9995 else milliseconds(seconds * 1000)
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400:,} d {whole % 86_400 // 3600:02d} h"


def milliseconds(value: float) -> str:
    """Write the time of a step, with three digits that mean something."""
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"


def number(value: float) -> str:
    """Write a loss: four places where it is of ordinary size, the exponent where it is not."""
    if value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value):
        return f"{value:.4f}"
    return f"{value:.3e}"


def metric(name: str, value: float) -> str:
    """Write a metric; an accuracy is a percentage."""
    if "accuracy" in name and 0 <= value <= 1:
        return f"{value:.2%}".replace("%", " %")
    return number(value)


def plural(value: int, noun: str, plural_noun: str | None = None) -> str:
    """Write a number with its noun: 1 process, 4 processes."""
    return f"{count(value)} {noun if value == 1 else plural_noun or noun + 's'}"

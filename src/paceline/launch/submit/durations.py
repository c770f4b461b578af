"""Lengths of time as people write them: 2h, 90m, 1d12h."""

from __future__ import annotations

import re

from paceline.errors import InputError

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
LONGEST_S = 366 * 86400


def seconds(name: str, text: str) -> int:
    """Read 2h, 90m, 1h30m, 1d12h or 45s; raise InputError, with `name` in front, where it is none of these."""
    found = re.fullmatch(
        r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s)?", text.strip().lower()
    )
    if found is None or not any(found.groups()):
        raise InputError(
            f"{name} {text!r} is no length of time. Give days, hours, minutes or seconds: 2h, 90m, 1d12h, 45s."
        )
    total = sum(int(count or 0) * unit for count, unit in zip(found.groups(), _UNITS.values(), strict=True))
    if not 0 < total <= LONGEST_S:
        raise InputError(
            f"{name} {text!r} is {total} seconds, but must be above 0 and at most {LONGEST_S // 86400} days."
        )
    return total


def for_slurm(total: int) -> str:
    """Write seconds as SLURM takes them: 1-12:00:00."""
    days, rest = divmod(total, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock

"""Which versions are installed, and whether they are ones that paceline was made for. Imports no torch."""

from __future__ import annotations

import operator
import platform
import re
from importlib import metadata

from paceline.doctor.finding import Finding, fail, ok, warn
from paceline.version import __version__

SHOWN = ("torch", "numpy", "pyzmq", "cryptography", "safetensors")
_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def versions() -> dict[str, str]:
    """Return the versions that machines of one run are compared by; those of packages that are not there are left out."""
    found = {"paceline": __version__, "python": platform.python_version()}
    for name in SHOWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def packages() -> list[Finding]:
    """Look at the packages that paceline needs."""
    found = versions()
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    try:
        needed = metadata.requires("paceline") or []
        installed = metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return [
            warn(
                "versions",
                f"{listed}; paceline itself is not installed, so which versions it needs is not known",
                "Install it: pip install paceline.",
                **found,
            )
        ]
    wrong = [*filter(None, (_unfit(text) for text in needed))]
    if installed != __version__:
        wrong.append(
            warn(
                "versions",
                f"paceline {__version__} is running, but {installed} is installed: two copies are on Python's path",
                "Look at PYTHONPATH, or install it again.",
            )
        )
    return wrong or [ok("versions", listed, **found)]


def curve() -> list[Finding]:
    """Look whether ZeroMQ has the encryption that launchers of several machines talk by."""
    import zmq

    if zmq.has("curve"):
        return []
    return [
        warn(
            "versions",
            f"this build of ZeroMQ ({zmq.zmq_version()}) has no CURVE: several machines cannot meet",
            "Install pyzmq's own wheel: pip install --force-reinstall --only-binary pyzmq pyzmq.",
        )
    ]


def _unfit(requirement: str) -> Finding | None:
    """Return what is wrong with a package that paceline requires; None where nothing is, or it is optional."""
    named = re.match(r"\s*([A-Za-z0-9._-]+)\s*([^;]*)(;.*)?$", requirement)
    if named is None or named[3]:  # an extra's, or another platform's
        return None
    name, wanted = named[1], named[2].strip(" ()")
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return fail("versions", f"{name} is not installed", f"Install it: pip install '{name}{wanted}'.")
    for comparison, bound in re.findall(r"(>=|<=|==|!=|>|<)\s*([0-9][0-9.]*)", wanted):
        if not _holds(comparison, _release(found), _release(bound)):
            return fail(
                "versions",
                f"{name} {found} is installed, but paceline {__version__} was made for {name}{wanted}",
                f"Install that: pip install '{name}{wanted}'.",
            )
    return None


def _holds(comparison: str, found: tuple[int, ...], bound: tuple[int, ...]) -> bool:
    length = max(len(found), len(bound))
    padded = [one + (0,) * (length - len(one)) for one in (found, bound)]
    return bool(_COMPARISONS[comparison](*padded))


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what a build appends: 2.13.0+cpu is (2, 13, 0)."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()

"""Who holds what: asks every worker for its references."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import WorkerGoneError
from paceline.remote.counted_references import held_here
from paceline.remote.proxy import call
from paceline.remote.registry import function
from paceline.remote.session import current


@dataclass(frozen=True)
class HeldReference:
    """Who holds references to one value."""

    identity: str
    what: str
    owner: str
    holders: tuple[str, ...]


@function
def _held() -> list[tuple[str, str, str]]:
    return held_here()


def references() -> list[HeldReference]:
    """Ask all workers what they hold, and give who holds what."""
    session = current()
    workers = [name for name in session.roles.names if name not in session.lost]
    answers = [(name, call(name, _held).future()) for name in workers]
    holders: dict[tuple[str, str, str], list[str]] = {}
    for name, answer in answers:
        try:
            found = answer.wait()
        except WorkerGoneError:
            continue  # what it held, nobody holds any more
        for key in found:
            holders.setdefault(key, []).append(name)
    return [HeldReference(*key, tuple(names)) for key, names in sorted(holders.items())]

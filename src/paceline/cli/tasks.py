"""`paceline tasks`: what can be trained out of the box."""

from __future__ import annotations

from paceline.cli.options import AsJson
from paceline.cli.outcome import print_json
from paceline.tasks import GAMES, TASKS


def tasks(json_: AsJson = False) -> None:
    """List the built-in tasks."""
    if json_:
        print_json(
            {name: {"reference": reference, "about": about} for name, (reference, about) in TASKS.items()}
        )
        return
    listed = {name: about for name, (_, about) in TASKS.items()} | GAMES
    width = max(map(len, listed))
    for name, about in listed.items():
        print(f"{name:{width}}  {about}")  # noqa: T201
    print("\nTrain one: paceline train digits --workers 2")  # noqa: T201
    print(f"Learned from episodes: paceline rollouts {', '.join(GAMES)}")  # noqa: T201

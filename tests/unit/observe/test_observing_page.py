"""docs/observing.md has every event with every field, and no other."""

import re
from dataclasses import fields
from pathlib import Path

from paceline.observe import events
from paceline.observe.sink_catalogue import SINKS

PAGE = (Path(__file__).parents[3] / "docs" / "observing.md").read_text()


def test_every_event_and_field_is_on_the_page():
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", PAGE.partition("## Events")[2], re.MULTILINE))
    known = {kind: {one.name for one in fields(made)} - {"time"} for kind, made in events._KINDS.items()}
    assert {kind: {*re.findall(r"`(\w+)`", text)} for kind, text in rows.items()} == known


def test_every_sink_is_on_the_page():
    assert {f"| `{name}` |" for name in SINKS} <= {
        line[: line.index("|", 1) + 1] for line in PAGE.splitlines() if line.startswith("| `")
    }

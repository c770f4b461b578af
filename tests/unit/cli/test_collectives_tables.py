import json

from rich.console import Console

from paceline.cli.collectives import render

SEEN = {
    "workers": 2,
    "device": "cpu",
    "backend": "gloo",
    "operations": [
        {
            "name": "gather",
            "sentence": "Every rank's numbers come together.",
            "training": "collects predictions.",
            "before": [[0, 1], [10, 11]],
            "after": [[0, 1, 10, 11], None],
        },
        {
            "name": "barrier",
            "sentence": "Nobody goes on.",
            "training": "checkpoints.",
            "before": ["arrives at 0 ms", "arrives at 20 ms"],
            "after": ["goes on at 20 ms", "goes on at 20 ms"],
        },
    ],
}


def show(observations):
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(render(observations))
    return capture.get()


def test_the_tables_show_what_was_held_and_fit_80_columns():
    lines = [line.rstrip() for line in show(json.loads(json.dumps(SEEN))).splitlines()]
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert ["0", "0", "1", "0", "1", "10", "11"] in rows
    assert ["1", "10", "11", "-"] in rows
    assert ["1", "arrives", "at", "20", "ms", "goes", "on", "at", "20", "ms"] in rows
    assert "In training: collects predictions." in lines

import io

import pytest
from rich.console import Console

from paceline.observe.sentences import promise
from paceline.observe.summary import render, show

RESULT = {
    "task": "digits",
    "strategy": "ddp",
    "workers": 2,
    "shards": 4,
    "exactness": "bitwise",
    "steps": 230,
    "samples": 14_370,
    "loss": 0.0199,
    "metrics": {"accuracy": 0.98611, "loss": 0.0434},
    "weights_sha256": "ab12" * 16,
    "step_ms_p50": 4.21,
    "step_ms_p95": 6.9,
    "wall_s": 8.0,
    "restarts": 0,
    "recoveries": [],
    "out": "runs/digits-1",
    "parameters": 30_634,
}


def shown(result, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(render(result), crop=False)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_summary_says_what_a_person_asks():
    lines = shown(RESULT)
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "trained 30,634 parameters, ddp on 2 workers, 4 shards",
        "exactness bitwise: same bits for any number of workers (4 shards)",
        "work 230 steps, 14,370 samples",
        "train loss 0.0199",
        "eval accuracy 98.61 %",
        "eval loss 0.0434",
        "time 8.0 s, 1,796 samples/s over all",
        "step p50 4.21 ms, p95 6.90 ms",
        "weights sha256 ab12ab12ab12ab12…",
        "folder runs/digits-1",
        "",
        "next",
        "paceline train digits --resume --out runs/digits-1 --steps 460",
        "paceline export runs/digits-1",
    ]
    assert lines[1].startswith("digits is trained ─")
    assert max(map(len, lines)) <= 80


def test_failures_are_told_when_there_were_any():
    text = "\n".join(shown({**RESULT, "recoveries": [{"seconds": 0.25}, {"seconds": 0.5}], "restarts": 1}))
    assert "2 recoveries in 750 ms, 1 restart" in text


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    "change",
    [
        {"metrics": {}},
        {
            "metrics": None,
            "loss": None,
            "step_ms_p50": None,
            "step_ms_p95": None,
            "wall_s": None,
            "out": None,
        },
        {"loss": float("nan"), "metrics": {"perplexity": float("inf")}},
        {
            "steps": 10**12,
            "samples": 10**18,
            "parameters": 10**15,
            "wall_s": 1e9,
            "step_ms_p95": 1e9,
            "loss": 1e300,
        },
        {"steps": 0, "samples": 0, "wall_s": 0.0},
        {"task": "[bold]x[/]", "exactness": "new", "out": "a folder/with [red] in it"},
    ],
)
def test_odd_results_still_show(change, width):
    lines = shown({**RESULT, **change}, width)
    commands = [line for line in lines if "paceline " in line]
    assert all(len(line) <= width for line in lines if line not in commands)
    assert "None" not in "\n".join(lines)
    assert len(commands) == (0 if change.get("out", "x") is None else 2)


def test_names_are_shown_as_they_are_and_commands_can_be_pasted():
    lines = shown({**RESULT, "task": "[bold]x", "out": "a folder"}, 40)
    assert lines[1].startswith("[bold]x is trained")
    assert "   paceline train '[bold]x' --resume --out 'a folder' --steps 460" in lines


def test_show_prints_it_to_a_stream_without_colour():
    stream = io.StringIO()
    show({**RESULT, "out": "runs/" + "x" * 200}, stream)
    assert "\x1b" not in stream.getvalue()
    assert f"paceline export runs/{'x' * 200}\n" in stream.getvalue()


@pytest.mark.parametrize(
    ("level", "shards_from", "words"),
    [
        ("bitwise", "task", "same bits for any number of workers (8 shards)"),
        ("bitwise", "option", "same bits for any number of workers (8 shards)"),
        ("bitwise", "workers", "same bits for any number of workers with --shards 8"),
        ("numeric", "workers", "same answer up to rounding for any number of workers with --shards 8"),
        ("statistical", "workers", "same answer only in expectation"),
    ],
)
def test_a_promise_says_what_it_rests_on(level, shards_from, words):
    assert promise(level, 8, shards_from) == words

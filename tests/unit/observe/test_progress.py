import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest
from rich.text import Text

from paceline.observe import (
    CheckpointDamaged,
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    Note,
    PlainProgress,
    RunFailed,
    RunFinished,
    RunStarted,
    StepFinished,
    formats,
    open_progress,
)
from paceline.observe.pace import Pace
from paceline.observe.progress import live_line

STARTED = RunStarted("digits", "ddp", 2, 4, "bitwise", "cpu", "gloo", 21, 1437, 64, 230, 10, 0, "runs/a")


def plain(events, **options):
    stream, output = io.StringIO(), io.StringIO()
    progress = PlainProgress(stream, output, **options)
    for event in events:
        progress.emit(event)
    progress.close()
    return stream.getvalue().splitlines()


def step(number, at=None, seconds=0.01):
    return StepFinished(
        number, (number - 1) // 23, 0.5, 64, seconds, 1e-3, time=at if at is not None else number * seconds
    )


def test_a_plain_log_reads_well():
    lines = plain(
        [
            STARTED,
            *(step(number) for number in range(1, 24)),
            EpochFinished(0, 23, 0.25),
            Evaluated(23, 0, {"accuracy": 0.98611, "loss": 0.05}, 360, 0.05),
            CheckpointDamaged("runs/a/step-1", "short file"),
            Note("slow disk"),
            RunFailed(1, "node", "ValueError: no"),
        ]
    )
    promise = "bitwise: same bits for any number of workers (4 shards)"
    assert lines == [
        f"digits: ddp on 2 workers (cpu, gloo) · {promise} · 21 parameters · 1,437 samples · batch 64",
        "step 1/230  epoch 1/10  loss 0.5000  6,400 samples/s  10.0 ms/step  2 s left",
        "epoch 1/10 done at step 23: loss 0.2500",
        "evaluated at step 23: accuracy 98.61 %, loss 0.0500 (360 samples in 50.0 ms)",
        "checkpoint runs/a/step-1 is damaged and was passed over: short file",
        "note: slow disk",
        "rank 1 on node failed: ValueError: no",
    ]


def test_a_plain_log_is_thinned_but_ends_with_the_last_step():
    events = [STARTED, *(step(number) for number in range(1, 51)), RunFinished({})]
    assert [line.split()[1] for line in plain(events)[1:]] == ["1/230", "50/230"]
    assert len(plain(events, every=0.0)) == 51


def test_saved_checkpoints_obey_the_same_limit():
    saved = [CheckpointSaved(number, f"step-{number}", 0.1) for number in range(5)]
    assert len(plain([*saved])) == 1
    assert len(plain([*saved], every=0.0)) == 5


def test_a_run_without_a_known_end_says_no_time_left():
    started = RunStarted("t", "ddp", 1, 1, "bitwise", "cpu", "none", 1, None, 64, None, None, 40, "runs/a")
    lines = plain([started, step(41)])
    assert lines[0].endswith("1 parameter · batch 64 · resumed at step 40")
    assert lines[1] == "step 41  epoch 2  loss 0.5000  6,400 samples/s  10.0 ms/step"


def test_own_output_goes_to_its_own_stream():
    stream, output = io.StringIO(), io.StringIO()
    progress = open_progress(stream, output)
    assert isinstance(progress, PlainProgress)
    progress.print("hel")
    progress.print("lo\n")
    progress.print("careful", error=True)
    progress.emit(Note("a line of its own"))
    assert output.getvalue() == "hello\n"
    assert stream.getvalue() == "careful\nnote: a line of its own\n"


def test_pace_needs_no_every_step_and_ignores_the_pause_of_an_evaluation():
    pace = Pace()
    pace.follow(STARTED)
    for number in range(1, 102, 10):
        pace.follow(step(number, at=number * 0.02, seconds=0.02))
    assert pace.seconds_per_step == pytest.approx(0.02)
    pace.follow(Evaluated(101, 0, {}, 360, 30.0, time=101 * 0.02 + 30))
    pace.follow(step(102, at=102 * 0.02 + 30, seconds=0.02))
    assert pace.seconds_per_step == pytest.approx(0.02)
    assert pace.samples_per_second == pytest.approx(64 / 0.02)
    assert pace.seconds_left == pytest.approx(128 * 0.02)


def test_pace_follows_a_change_within_its_window():
    pace = Pace()
    pace.follow(STARTED)
    now = 0.0
    for number in range(1, 1001):
        now += 0.01 if number <= 500 else 0.1
        pace.follow(step(number, at=now))
    assert pace.seconds_per_step == pytest.approx(0.1)


@pytest.mark.parametrize("width", [1, 5, 20, 30, 40, 60, 79, 90, 110, 119, 300])
@pytest.mark.parametrize(
    "task", ["digits", "数字" * 20, "path/to/long_name_of_a_file.py:ALongNameOfAClassInAFile"]
)
def test_the_live_line_fits_every_width(width, task):
    pace = Pace()
    pace.follow(RunStarted(task, "ddp", 2, 2, "bitwise", "cpu", "gloo", 1, 1, 64, 10**9, 10**4, 0, "a"))
    waiting = live_line(pace, width)
    pace.follow(StepFinished(123_456_789, 1234, 1e30, 64, 0.01, 1e-3))
    line = live_line(pace, width)
    assert max(waiting.cell_len, line.cell_len) <= width
    assert "\n" not in line.plain


def test_the_live_line_shows_everything_where_there_is_room():
    pace = Pace()
    pace.follow(STARTED)
    pace.follow(step(115))
    wide, usual = live_line(pace, 119).plain, live_line(pace, 79).plain
    speed = "115/230  epoch 5/10  loss 0.5000  6,400 samples/s"
    assert wide == f"digits  {'━' * 36}  {speed}  10.0 ms/step  1 s left"
    assert usual == f"digits  {'━' * 10}  {speed}  1 s left"
    assert "##" in live_line(pace, 119, ascii_only=True).plain


LIVE = """
import sys, time
from paceline.observe import *
progress = open_progress()
assert isinstance(progress, TerminalProgress)
progress.emit(RunStarted("digits", "ddp", 2, 4, "bitwise", "cpu", "gloo", 30634, 1437, 64, 300, 10, 0, "a"))
for number in range(1, 301):
    progress.emit(StepFinished(number, (number - 1) // 30, 1 / number, 64, 0.001, 1e-3))
    time.sleep(0.001)
    if number % 100 == 0:
        progress.print(f"own output {number}")
    if number == 150:
        progress.emit(Evaluated(150, 4, {"accuracy": 0.9}, 360, 0.1))
progress.emit(RunFinished({}))
progress.close()
"""


def run_in_terminal(code, columns, kind="xterm-256color"):
    """Run code with a pseudo-terminal of this width and kind; give what it wrote."""
    main, side = pty.openpty()
    ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=side,
        stdout=side,
        stderr=side,
        env={**os.environ, "TERM": kind},
    )
    os.close(side)
    chunks = []
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # Linux says so when the last writer is gone
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(main)
    assert process.wait() == 0, b"".join(chunks).decode()
    return b"".join(chunks).decode()


def screen(written, columns):
    """Replay carriage returns, line feeds and erasures as a terminal does; refuse a line that would wrap."""
    rows, column = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if piece == "\n":
            rows.append("")
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[2K":
            rows[-1] = ""
        elif piece == "\x1b[K":
            rows[-1] = rows[-1][:column]
        elif not piece.startswith("\x1b"):
            rows[-1] = rows[-1][:column].ljust(column) + piece + rows[-1][column + len(piece) :]
            column += len(piece)
            assert column < columns or "workers" in rows[-1], rows[-1]
    return rows


@pytest.mark.parametrize("columns", [80, 132])
def test_on_a_terminal_one_line_lives_below_what_stays(columns):
    written = run_in_terminal(LIVE, columns)
    rows = screen(written, columns)
    assert rows[0].startswith("digits: ddp on 2 workers")
    assert rows[1:] == [
        "own output 100",
        "evaluated at step 150: accuracy 90.00 % (360 samples in 100 ms)",
        "own output 200",
        "own output 300",
        "",
    ]
    drawn = [Text.from_ansi(part).plain for part in written.split("\r") if "━" in part]
    # 300 steps take a third of a second or more; ten draws a second, and one after each other line.
    assert 5 <= len(drawn) < 100
    assert all(len(line.split("\n")[0]) < columns for line in drawn)


def test_a_terminal_that_cannot_move_its_cursor_gets_the_log():
    code = "from paceline.observe import *; p = open_progress(); p.emit(Note('x')); p.print(type(p).__name__)"
    assert run_in_terminal(code, 80, "dumb") == "note: x\r\nPlainProgress"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (formats.count(1_797), "1,797"),
        (formats.count(124_400_000), "124.4 M"),
        (formats.count(999_960_000), "1.0 G"),
        (formats.count(10**25), "10,000,000.0 E"),
        (formats.duration(0.0004), "0.40 ms"),
        (formats.duration(9.96), "10 s"),
        (formats.duration(59.7), "1 min 00 s"),
        (formats.duration(125), "2 min 05 s"),
        (formats.duration(7_380), "2 h 03 min"),
        (formats.duration(200_000), "2 d 07 h"),
        (formats.duration(float("inf")), "unknown"),
        (formats.number(1e-9), "1.000e-09"),
        (formats.number(0), "0.0000"),
        (formats.metric("accuracy", 0.98611), "98.61 %"),
        (formats.metric("token_accuracy", 1), "100.00 %"),
        (formats.metric("accuracy", 98.6), "98.6000"),
        (formats.plural(1, "process", "processes"), "1 process"),
        (formats.plural(2, "process", "processes"), "2 processes"),
    ],
)
def test_numbers_read_well(made, expected):
    assert made == expected

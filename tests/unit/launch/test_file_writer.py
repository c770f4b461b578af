"""What the launcher's files get where the disk does not take it: kept, or counted in its place and said once."""

import time

import pytest

from paceline.launch import file_writer
from paceline.launch.file_writer import FileWriter
from paceline.observe.events import Note, from_json, to_json
from tests.patience import HANG_S, Stopwatch


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.setattr(file_writer, "KEPT", 150)
    monkeypatch.setattr(file_writer, "RETRY_S", 0.05)
    made = FileWriter()
    yield made
    made.close()


def wait_until(condition):
    watch = Stopwatch()
    while not condition():
        assert watch.seconds() < HANG_S
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["events.jsonl", "rank-0.log"])
def test_what_was_dropped_is_counted_in_its_place_and_said_once(writer, tmp_path, name):
    path = tmp_path / "run" / name
    line = (to_json(Note(text="x" * 20)) + "\n").encode()
    assert 2 * len(line) <= 150 < 3 * len(line)
    for _ in range(4):  # of which two fit
        writer.append(path, line)
    said = []
    wait_until(lambda: said.append(writer.take_complaint() or "") or "No such file" in "".join(said))
    path.parent.mkdir()
    wait_until(lambda: path.exists() and "dropped here" in path.read_text())
    writer.append(path, line)
    wait_until(writer.flush)
    text = path.read_text()
    assert text.startswith(2 * line.decode())
    assert text.endswith(line.decode())
    assert text.count(line.decode()) == 3
    assert text.count(f"{2 * len(line)} bytes were dropped here") == 1
    if name.endswith(".jsonl"):
        assert [type(from_json(one)) for one in text.splitlines()] == [Note] * 4
    assert "".join(said).count(f"{name} has lost what the disk did not take in time") == 1
    assert writer.take_complaint() is None


def test_what_is_lost_at_the_end_is_said(writer, tmp_path):
    writer.append(tmp_path / "not there" / "events.jsonl", b"x" * 100)
    writer.append(tmp_path / "not there" / "events.jsonl", b"x" * 100)
    writer.close()
    assert "200 bytes of events.jsonl were lost at the end" in writer.take_complaint()

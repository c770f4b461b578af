import os
import threading
import time

import pytest

from paceline.observe import EpochFinished, Fanout, JsonlSink, Note, RelaySink, StepFinished, from_json


def step(number):
    return StepFinished(number, 0, 1.0 / number, 64, 0.001, 1e-3)


def events_in(path):
    return [from_json(line) for line in path.read_text().splitlines()]


def test_jsonl_keeps_every_event_in_order_and_appends(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    sent = [*(step(number) for number in range(1, 1001)), EpochFinished(0, 1000, 0.5)]
    for half in (sent[:400], sent[400:]):
        sink = JsonlSink(path)
        for event in half:
            sink.emit(event)
        sink.close()
        sink.close()
    assert events_in(path) == sent


def test_jsonl_buffers_steps_but_nothing_else(tmp_path):
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path, every=60)
    sink.emit(Note("first"))
    sink.emit(step(1))
    assert len(events_in(path)) == 1
    sink.emit(Note("second"))
    assert [event.kind for event in events_in(path)] == ["note", "step", "note"]
    sink.close()


def test_jsonl_writes_steps_after_its_interval(tmp_path):
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path, every=0.05)
    sink.emit(step(1))
    sink.emit(step(2))
    assert len(events_in(path)) == 1
    time.sleep(0.06)
    sink.emit(step(3))
    assert len(events_in(path)) == 3
    sink.close()


def test_jsonl_writes_steps_when_a_checkpoint_is_begun(tmp_path):
    sink = JsonlSink(tmp_path / "events.jsonl", every=1e9)
    sink.emit(Note(text="the first event is written"))
    sink.emit(step(1))
    sink.flush()
    assert [event.kind for event in events_in(tmp_path / "events.jsonl")] == ["note", "step"]
    sink.close()


@pytest.mark.parametrize("torn", ['{"kind":"no', "x" * 200_000])
def test_jsonl_drops_half_a_line_that_a_crash_left(tmp_path, torn):
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(Note("whole"))
    sink.close()
    with path.open("a") as file:
        file.write(torn)
    sink = JsonlSink(path)
    sink.emit(Note("after"))
    sink.close()
    assert [event.text for event in events_in(path)] == ["whole", "after"]


def test_jsonl_takes_events_from_several_threads(tmp_path):
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path, every=0.0)
    threads = [threading.Thread(target=lambda: [sink.emit(step(n)) for n in range(1, 301)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    assert sorted(event.step for event in events_in(path)) == sorted(list(range(1, 301)) * 4)


def read_all(fd):
    with os.fdopen(fd, "rb") as file:
        return [from_json(line.decode()) for line in file]


def test_relay_thins_steps_and_always_tells_the_newest():
    reader, writer = os.pipe()
    sink = RelaySink(writer, every=60)
    for number in range(1, 101):
        sink.emit(step(number))
    sink.emit(EpochFinished(0, 100, 0.5))
    sink.emit(Note("one"))
    sink.emit(step(101))
    sink.close()
    sink.close()
    got = read_all(reader)
    assert [event.kind for event in got] == ["step", "step", "epoch", "note", "step"]
    assert [event.step for event in got if event.kind == "step"] == [1, 100, 101]


def test_relay_sends_steps_again_after_its_interval():
    reader, writer = os.pipe()
    sink = RelaySink(writer, every=0.02)
    sink.emit(step(1))
    sink.emit(step(2))
    time.sleep(0.03)
    sink.emit(step(3))
    sink.close()
    assert [event.step for event in read_all(reader)] == [1, 3]


def test_relay_never_waits_for_a_reader_that_sleeps_and_loses_no_note():
    reader, writer = os.pipe()
    sink = RelaySink(writer)
    notes = [f"{number} " + "x" * 1000 for number in range(500)]
    started = time.monotonic()
    for text in notes:
        sink.emit(Note(text))
    assert time.monotonic() - started < 1.0
    got = []
    thread = threading.Thread(target=lambda: got.extend(read_all(reader)))
    thread.start()
    sink.close()
    thread.join()
    assert [event.text for event in got] == notes


def test_relay_gives_up_on_a_reader_that_never_wakes():
    reader, writer = os.pipe()
    sink = RelaySink(writer, patience=0.1)
    sink.emit(Note("x" * 200_000))
    started = time.monotonic()
    sink.close()
    assert 0.09 < time.monotonic() - started < 5
    os.close(reader)


def test_relay_outlives_its_reader():
    reader, writer = os.pipe()
    sink = RelaySink(writer)
    os.close(reader)
    sink.emit(Note("nobody hears"))
    sink.emit(step(1))
    sink.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writer)


def test_fanout_gives_all_and_closes_all_even_when_one_fails(tmp_path):
    class Failing:
        def emit(self, event):
            pass

        def close(self):
            raise OSError("disk full")

    first, last = JsonlSink(tmp_path / "a"), JsonlSink(tmp_path / "b")
    sink = Fanout([first, Failing(), last])
    sink.emit(step(1))
    sink.emit(step(2))
    with pytest.raises(OSError, match="disk full"):
        sink.close()
    assert len(events_in(tmp_path / "a")) == len(events_in(tmp_path / "b")) == 2

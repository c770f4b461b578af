"""The moments of a profile on a GPU, which stands in here: events that a capture has taken have no time."""

from __future__ import annotations

import pytest
import torch

from paceline.training.profile import _Timeline


class Event:
    """As torch's, a second apart; one that was recorded into a graph raises where it is asked for its time."""

    capturing = False
    clock = 0

    def __init__(self, **_: object) -> None:
        self.captured, self.at = False, 0

    def record(self) -> None:
        Event.clock += 1
        self.captured, self.at = Event.capturing, Event.clock

    def elapsed_time(self, other: Event) -> float:
        if self.captured or other.captured:
            raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")
        return (other.at - self.at) * 1e3


def test_what_is_captured_meanwhile_has_no_time_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Event.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timeline = _Timeline(torch.device("cuda"))
    with timeline.span("forward"):
        pass
    Event.capturing = True
    with timeline.span("forward"), timeline.span("data"):
        pass
    Event.capturing = False
    with timeline.span("optimizer"):
        pass
    timeline.stop()
    _, device = timeline.seconds()
    assert device["forward"] == 1
    assert device["optimizer"] == 1
    assert device["data"] == 0

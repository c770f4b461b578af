import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import observe
from paceline.errors import InputError
from paceline.observe import events

STARTED = events.RunStarted(
    "digits", "ddp", 2, 4, "bitwise", "cpu", "gloo", 30_634, None, 64, 230, None, 0, "runs/a"
)
ALL = [
    STARTED,
    events.StepFinished(1, 0, 2.5, 64, 0.004, 1e-3, 0.7),
    events.StepFinished(2, 0, 2.25, 64, 0.004, 1e-3, None, {"balance": 0.5}),
    events.Logged(2, 0, {"accuracy": 0.5}),
    events.EpochFinished(0, 23, 0.5),
    events.Evaluated(23, 0, {"accuracy": 0.98, "loss": 0.1}, 360, 0.05),
    events.CheckpointSaved(23, "runs/a/checkpoints/step-23", 0.01),
    events.CheckpointDamaged("runs/ä/checkpoints/step-22", "short\nfile"),
    events.Note("NaN"),
    events.Profiled(5, {"data": 0.001, "other": 0.002}, {}, "runs/a/profile/trace.json"),
    events.Straggling(2, "host", 1.8, "data"),
    events.WorkerLost(1, "host", "was killed by SIGKILL"),
    events.Regrouped(1, 2, 17, "rank 1 was killed by SIGKILL", 0.05),
    events.RunFinished({"task": "digits", "metrics": {"accuracy": 0.98}, "recoveries": [{"seconds": 0.1}]}),
    events.RunFailed(1, "host", "RuntimeError: no"),
]


@pytest.mark.parametrize("event", ALL, ids=lambda event: event.kind)
def test_every_event_survives_the_round_trip_on_one_line(event):
    line = observe.to_json(event)
    assert "\n" not in line
    assert json.loads(line)["kind"] == event.kind
    back = observe.from_json(line)
    assert type(back) is type(event)
    assert back == event


def test_the_list_above_covers_every_kind():
    assert {type(event) for event in ALL} == set(events._KINDS.values())
    assert len(events._KINDS) == 14


@given(
    loss=st.floats(allow_nan=False),
    norm=st.none() | st.floats(allow_nan=False),
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False)),
)
def test_any_number_survives_and_the_line_is_strict_json(loss, norm, metrics):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    step = events.StepFinished(1, 0, loss, 1, 0.1, 0.1, norm)
    evaluated = events.Evaluated(1, 0, metrics, 1, 0.1)
    for event in (step, evaluated):
        line = events.to_json(event)
        json.loads(line, parse_constant=refuse)
        assert events.from_json(line) == event


def test_a_step_of_other_number_types_is_written_as_json():
    step = events.StepFinished(1, 0, np.float64(0.5), 64, 1, 0, np.float64(2.0))
    assert json.loads(events.to_json(step))["loss"] == 0.5
    assert events.from_json(events.to_json(step)) == step


def test_nan_comes_back_as_nan():
    back = events.from_json(events.to_json(events.EpochFinished(0, 1, math.nan)))
    assert math.isnan(back.loss)


def test_time_is_that_of_emission():
    first, second = events.Note("a"), events.Note("b")
    assert 1.7e9 < first.time <= second.time


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "3", '{"kind":"never"}', '{"kind":"note"}', '{"kind":"note","x":1}']
)
def test_a_line_that_is_no_event_is_refused_in_one_line(line):
    with pytest.raises(InputError) as caught:
        events.from_json(line)
    assert "\n" not in str(caught.value)


def test_nothing_here_imports_torch_nor_rich():
    code = (
        "import sys, io, paceline.observe as o, paceline.tasks;"
        "p = o.open_progress(io.StringIO(), io.StringIO()); p.emit(o.Note('x'));"
        "print([name for name in ('torch', 'rich', 'tensorboard') if name in sys.modules])"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"

"""A rank that leaves a call of a world that goes on: the others hear of it at once, and all meet in the next call."""

import json
import subprocess
import sys

import pytest

from tests.dist.launch.test_joining import TORCHRUN, start, start_by_hand
from tests.patience import HANG_S

LOOP = """
import json, os, pathlib, time
import paceline, torch
from torch import nn

RANK = os.environ["RANK"]
DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

def train(run, error=None):
    model = nn.Linear(4, 1)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(DATA, batch_size=16, epochs=1):
        for x in step:
            step.backward(model(x).square().flatten())
        if step.number == 2 and error is not None and RANK == "1":
            raise error
        step.apply()
    return run.weights_sha256()

def leave(run):
    return "left"

told = []

def call(*args, **options):
    try:
        told.append(paceline.launch(*args, **options)[0])
    except BaseException as error:
        told.append(f"{type(error).__name__}: {error}")

"""

SEVERAL = (
    LOOP
    + """
call(train, ValueError("boom"))
call(train, KeyboardInterrupt(), strategy="fsdp")
call(train, paceline.InputError("no such column"))
call(train, seed=-1 if RANK == "0" else 0)
try:
    told.append(paceline.train("dense4096" if RANK == "0" else "nosuch.py", steps=1, progress=False).steps)
except paceline.PacelineError as error:
    told.append(type(error).__name__)
call(train if RANK == "1" else leave)
call(train)
pathlib.Path(f"told-{RANK}.json").write_text(json.dumps(told))
"""
)


@pytest.mark.parametrize("launcher", [TORCHRUN, ("-m", "paceline", "run", "-n", "2"), ()],
                         ids=["torchrun", "paceline run", "by hand"])  # fmt: skip
def test_the_others_hear_why_a_rank_has_left_and_all_go_on(launcher, tmp_path):
    (tmp_path / "script.py").write_text(SEVERAL)
    if launcher:
        start(tmp_path, *launcher, "script.py")
    else:
        start_by_hand(tmp_path, "script.py")
    first, second = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)]
    boom, stopped, refused, seed, missing, others, last = zip(first, second, strict=True)
    assert boom[0].startswith("WorkerFailedError: rank 1 on ")
    assert boom[0].endswith("has left this call: ValueError: boom")
    assert boom[1] == "ValueError: boom"
    assert stopped[0].endswith("has left this call: KeyboardInterrupt")
    assert stopped[1].startswith("KeyboardInterrupt")
    assert refused == ("InputError: rank 1 has left this call: no such column", "InputError: no such column")
    assert seed[0].startswith("InputError: seed is -1")
    assert seed[1].startswith("InputError: rank 0 has left this call: seed is -1")
    assert missing == ("InputError", "InputError")
    assert others[0] == "left"
    assert "rank 0 on " in others[1]
    assert "has come to the end of this call, in which others still wait for it" in others[1]
    assert last[0] == last[1]
    assert len(last[0]) == 64


RETURNS = (
    LOOP
    + """
def leave_early(run):
    model, _ = run.prepare(nn.Linear(4, 1), lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    for step in run.steps(DATA, batch_size=16, epochs=1):
        if step.number == 2 and run.world.rank == 1:
            return "early"
        for x in step:
            step.backward(model(x).square().flatten())
        step.apply()

def measure_alone(run):
    train(run)
    if run.world.rank == 0:
        run.evaluate(DATA, lambda model, x: {"mean": paceline.Mean(model(x).sum(), len(x))})

for strategy in ("ddp", "fsdp"):
    call(leave_early, strategy=strategy)
call(measure_alone)
pathlib.Path(f"told-{RANK}.json").write_text(json.dumps(told))
"""
)


def test_a_rank_whose_function_returns_early_is_named_where_another_waits_for_it(tmp_path):
    (tmp_path / "script.py").write_text(RETURNS)
    start(tmp_path, "-m", "paceline", "run", "-n", "2", "script.py")
    (*loops, alone), (*left, _) = [
        json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)
    ]
    said = "InputError: rank 1 left the loop of run.steps after step 1, and rank 0 waits for it in step 2. All workers"
    assert [words[: len(said)] for words in loops] == [said] * 2
    assert all(
        words.startswith("InputError: rank 0 has left this call: rank 1 left the loop") for words in left
    )
    assert alone.startswith(
        "InputError: rank 0 called run.evaluate(), and rank 1 has not and never will: its function has ended."
    )
    assert "slow" not in alone


SKIPPED = (
    LOOP
    + """
from paceline.world import join, presence
call(train)
join.SILENT_S = 0.3
if RANK == "0":
    call(train)
else:
    while presence._store.get("presence/at/0") != b"in its call 2":
        time.sleep(0.05)
    time.sleep(2)
pathlib.Path(f"told-{RANK}.json").write_text(json.dumps(told))
"""
)


def test_a_rank_waits_for_none_that_has_ended_and_says_meanwhile_at_which_call_it_is(tmp_path):
    (tmp_path / "script.py").write_text(SKIPPED)
    ended = subprocess.run(
        [sys.executable, *TORCHRUN, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    done, waited = json.loads((tmp_path / "told-0.json").read_text())
    assert len(done) == 64
    assert waited.endswith("has ended and will not come to this call")
    said = next(line for line in ended.stderr.splitlines() if "for all 2 ranks to meet" in line)
    assert said.endswith("this rank is in its call 2, rank 1 is through with its call 1")


ENDED = (
    LOOP
    + """
import sys
from paceline.world import ended
ended.ABSENT_S = 0.5
when = int(sys.argv[1])
for number in range(2):
    if RANK == "1" and number == when:
        os._exit(0)
    call(leave)
pathlib.Path(f"told-{RANK}.json").write_text(json.dumps(told))
"""
)


@pytest.mark.parametrize(
    "launcher", [TORCHRUN, ("-m", "paceline", "run", "-n", "2")], ids=["torchrun", "paceline run"]
)
@pytest.mark.parametrize("when", [0, 1])
def test_a_rank_that_ends_without_a_word_is_not_waited_for(launcher, when, tmp_path):
    (tmp_path / "script.py").write_text(ENDED)
    start(tmp_path, *launcher, "script.py", str(when))
    told = json.loads((tmp_path / "told-0.json").read_text())
    assert told[:when] == ["left"] * when
    assert all(one.endswith("has ended and will not come to this call") for one in told[when:])
    assert told[when].startswith("WorkerFailedError: rank 1 on ")


VANISHED = (
    LOOP
    + """
def vanish(run):
    if RANK == "1":
        os._exit(0)
    return train(run)

call(leave)
call(vanish)
pathlib.Path(f"told-{RANK}.json").write_text(json.dumps(told))
"""
)


@pytest.mark.parametrize(
    "launcher", [TORCHRUN, ("-m", "paceline", "run", "-n", "2")], ids=["torchrun", "paceline run"]
)
def test_nor_is_one_that_ends_so_in_a_call(launcher, tmp_path):
    (tmp_path / "script.py").write_text(VANISHED)
    start(tmp_path, *launcher, "script.py")
    _, told = json.loads((tmp_path / "told-0.json").read_text())
    assert told.startswith("WorkerFailedError: rank 1 on ")
    assert told.endswith("has ended in this call, before its part was done")

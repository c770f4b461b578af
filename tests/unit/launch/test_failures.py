"""Which of several failures began it, and how it is told."""

import runpy

import pytest
import torch

from paceline.data import ShardedLoader
from paceline.errors import CheckpointError, DiskFaultError, InputError, RecordsError, WorkerFailedError
from paceline.launch import failures
from paceline.launch.workers.context import Worker, is_between_steps, open_run, step_of
from paceline.recovery.agreement import RolledBackError
from paceline.training.options import Every
from paceline.world.env import Identity


def caught(error):
    try:
        raise error
    except BaseException as seen:  # noqa: BLE001
        return failures.from_exception(seen, 0, "host")


def test_a_worker_that_only_lost_its_peers_says_what_it_came_to():
    failure = caught(RolledBackError(4))
    words = (
        "stopped: RolledBackError: a worker was lost, and the newest state that is whole is that of step 4"
    )
    assert (failure.kind, failure.cause()) == ("peer", words)


@pytest.mark.parametrize("cause", ["has left this call: ValueError: no. Why", "has ended in this call"])
def test_one_that_knows_which_other_rank_ended_says_so_in_one_line(cause):
    failure = caught(WorkerFailedError(1, "there", cause))
    assert (failure.kind, failure.trace) == ("peer", "")
    assert failure.cause() == f"stopped: rank 1 on there {cause}"
    own = WorkerFailedError(0, "host", "exited with status 0 before its part was done")
    own.__cause__ = SystemExit(0)
    failure = caught(own)
    assert (failure.kind, failure.cause()) == ("exit", own.cause)
    assert failure.trace == "SystemExit: 0\n"
    assert caught(WorkerFailedError(1, "there", "failed", "of a launch in the script")).kind == "code"


@pytest.mark.parametrize(("end", "place"), [("first", " before step 0"), ("body", " in step 1"), ("apply", " after step 1"),
                                            ("end", " after step 3")])  # fmt: skip
def test_where_in_the_run_an_exception_came(end, place):
    with pytest.raises(ValueError, match="boom") as seen, open_run(Worker(identity=ALONE), {}) as run:
        fail(run, end)
    step, between = step_of(seen.value), is_between_steps(seen.value)
    assert failures.from_exception(seen.value, 0, "host", step, between=between).place() == place


ALONE = Identity(rank=0, size=1, local_rank=0, local_size=1)


def fail(run, end):
    model = torch.nn.Linear(2, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if end == "first":
        raise ValueError("boom")
    for step in run.steps(torch.ones(8, 2), batch_size=2, epochs=1):
        for x in step:
            if end == "body" and step.number == 1:
                raise ValueError("boom")
            step.backward(model(x).flatten())
        step.apply()
        if end == "apply" and step.number == 1:
            raise ValueError("boom")
    raise ValueError("boom")


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (InputError("no"), "input", 2),
        (CheckpointError("damaged"), "input", 2),
        (DiskFaultError("full"), "disk", 1),
        (RecordsError("full"), "disk", 1),
        (ValueError("no"), "code", 1),
        (LOST, "peer", 1),
        (ConnectionResetError("connection reset by peer"), "code", 1),
        (RuntimeError("shapes differ"), "code", 1),
    ],
)
def test_an_exception_is_of_a_kind(error, kind, status):
    failure = caught(error)
    assert (failure.kind, failure.status) == (kind, status)


@pytest.mark.parametrize(
    ("status", "kind", "cause"),
    [
        (-9, "signal", "was killed by SIGKILL"),
        (-11, "signal", "was killed by SIGSEGV"),
        (3, "exit", "exited with status 3"),
    ],
)
def test_a_status_is_put_into_words(status, kind, cause):
    failure = failures.from_status(status, 1, "host")
    assert (failure.kind, failure.cause()) == (kind, cause)


def test_a_real_time_signal_has_a_number_only():
    assert failures.from_status(-40, 0, "host").cause() == "was killed by signal 40"


def test_losing_a_peer_is_never_the_cause_while_there_is_another():
    lost, broken, killed = caught(LOST), caught(ValueError("no")), failures.from_status(-9, 1, "host")
    assert failures.first_cause([lost, broken]) is broken
    assert failures.first_cause([lost, killed, broken]) is killed
    assert failures.first_cause([lost]) is lost
    assert failures.first_cause([broken, caught(InputError("no"))]).kind == "input"


def test_the_way_to_the_users_code_is_cut_off_and_nothing_else(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def inner():\n    raise ValueError('no')\ninner()\n")
    with pytest.raises(ValueError, match="no") as seen:
        runpy.run_path(str(script))
    # As if the launcher had called runpy: this test's own frame goes, runpy's go with it.
    error = seen.value.with_traceback(seen.value.__traceback__.tb_next)
    assert failures.user_traceback(error).splitlines()[1].strip() == f'File "{script}", line 3, in <module>'


def test_code_that_comes_back_through_the_launcher_keeps_its_frames():
    def theirs():
        failures.from_status("not a status", 0, "host")

    with pytest.raises(TypeError) as seen:
        theirs()
    text = failures.user_traceback(seen.value)
    assert "in theirs" in text
    assert "in from_status" in text


class _Torn:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise KeyError("torn")


def test_a_data_set_that_raises_is_the_first_thing_shown():
    loader = ShardedLoader(_Torn(), batch_size=2, shards=1, seed=0, owned=range(1))
    try:
        next(loader.epoch(0))
    except KeyError as error:
        # Without this test's own frame, which stands where the launcher's would.
        text = failures.user_traceback(error.with_traceback(error.__traceback__.tb_next))
    assert text.splitlines()[1].strip().startswith(f'File "{__file__}"')
    assert "in __getitem__" in text
    assert "map_style.py" not in text


def test_a_failure_in_our_own_code_is_shown_whole():
    try:
        Every(steps=2).after_step(None)
    except TypeError as error:
        text = failures.user_traceback(error.with_traceback(error.__traceback__.tb_next))
    assert "options.py" in text


def test_a_shard_of_one_sample_is_named_where_batchnorm_cannot_take_it() -> None:
    with pytest.raises(ValueError, match="more than 1 value") as seen:
        torch.nn.BatchNorm1d(3)(torch.ones(1, 3))
    assert "has two samples for each of them" in failures.user_traceback(seen.value).splitlines()[-1]

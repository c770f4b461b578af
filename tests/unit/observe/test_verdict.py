from __future__ import annotations

import dataclasses
import faulthandler
import pickle
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.observe.verdict import Collective, Frame, Verdict, WorkerEvidence, is_users, judge, parse_stacks
from paceline.world.status_page import OperationKind, Phase, Reading

STANDARD = sysconfig.get_path("stdlib")
PACKAGE = Path(paceline.__file__).parent
ALL_REDUCE, BARRIER = Collective(12, "all_reduce"), Collective(12, "barrier")
READING = Reading(
    phase=Phase.COMMUNICATION,
    since=0.0,
    touched=0.0,
    operation=42,
    kind=OperationKind.STEP,
    step=41,
    batches=41,
    steps=40,
    data_s=0.0,
    compute_s=0.0,
    communication_s=0.0,
    longest_s=0.0,
)
IN_GETITEM = (Frame("/home/me/digits.py", 33, "__getitem__"), Frame(f"{PACKAGE}/data/reading.py", 5, "read"))
IN_LOOP = (
    Frame("/x/lib/python3.12/site-packages/torch/distributed/c10d.py", 3, "all_reduce"),
    Frame("/home/me/train.py", 50, "main"),
)


def evidence(rank: int, phase: Phase = Phase.COMMUNICATION, **changes: Any) -> WorkerEvidence:
    own = {name for name in changes if name in WorkerEvidence.__dataclass_fields__}
    reading = dataclasses.replace(
        READING, phase=phase, **{name: value for name, value in changes.items() if name not in own}
    )
    known = {"silent_s": 60.0, "limit_s": 60.0, **{name: changes[name] for name in own}}
    return WorkerEvidence(rank=rank, host="node1", reading=reading, **known)


def test_a_rank_stuck_in_reading_data() -> None:
    verdict = judge(
        [
            evidence(0, pending=(ALL_REDUCE,)),
            evidence(2, Phase.DATA, batches=40, threads=(IN_GETITEM,)),
            evidence(1),
        ]
    )
    assert verdict == Verdict(
        "stuck",
        (2,),
        "rank 2 on node1 never entered the gradient reduction of step 41, all_reduce (collective 12): for 1 min 00 s it has been "
        "at digits.py:33 in __getitem__ (reading data); it has served 40 batches, the others 41.",
    ), verdict.sentence


def test_a_rank_that_waits_in_a_call_which_the_others_never_make() -> None:
    gathering = tuple(
        Frame(f"{PACKAGE}/{file}", 7, "wait")
        for file in ("world/shared_memory.py", "strategies/fsdp/reduction.py")
    )
    late = evidence(1, Phase.COMPUTE, threads=((*gathering, Frame("/home/me/train.py", 9, "main")),))
    words = judge([evidence(0), late]).sentence
    assert words.endswith("call the model equally often in each batch, however their samples are?"), words


def test_a_rank_stuck_in_an_evaluation_that_shows_no_stack() -> None:
    verdict = judge(
        [
            evidence(0, kind=OperationKind.EVALUATE),
            evidence(1, Phase.COMPUTE, kind=OperationKind.EVALUATE, state="D", silent_s=75.0),
        ]
    )
    assert (verdict.kind, verdict.stuck) == ("stuck", (1,))
    assert verdict.sentence == (
        "rank 1 on node1 never entered the evaluation at step 41: for 1 min 15 s it has been computing, blocked on a disk or a "
        "network file system at a place unknown, since it showed no stack; it has served 41 batches, the others 41."
    )


def test_two_ranks_stuck_at_once() -> None:
    stuck = [
        evidence(1, Phase.DATA, batches=40, threads=(IN_GETITEM,)),
        evidence(3, Phase.COMPUTE, state="R", threads=(IN_LOOP,)),
    ]
    verdict = judge([evidence(0), *stuck, evidence(2)])
    assert (verdict.kind, verdict.stuck) == ("stuck", (1, 3))
    assert verdict.sentence == (
        "ranks 1 and 3 on node1 never entered the gradient reduction of step 41: for 1 min 00 s rank 1 has been at digits.py:33 "
        "in __getitem__ (reading data), rank 3 has been at train.py:50 in main (computing, running on); "
        "they have served 40 to 41 batches, the others 41."
    )


def test_a_worker_alone_that_is_stuck() -> None:
    verdict = judge([evidence(0, Phase.DATA, threads=(IN_GETITEM,))])
    assert (verdict.kind, verdict.stuck) == ("shared", ())
    assert verdict.sentence == (
        "rank 0 on node1 made no progress in step 41: for 1 min 00 s it has been at digits.py:33 in __getitem__ (reading data); "
        "it has served 41 batches; nobody is replaced for what may come from outside, and the run waits (Ctrl-C ends it)."
    )


def test_several_that_stand_still_in_the_same_phase_share_what_holds_them() -> None:
    reading = [evidence(rank, Phase.DATA) for rank in range(2)]
    for others in ([], [evidence(2), evidence(3)], [evidence(rank) for rank in range(2, 8)]):
        verdict = judge([*reading, *others])
        assert (verdict.kind, verdict.stuck) == ("shared", ())
        assert verdict.sentence.startswith("ranks 0 and 1 on node1 ")
    third = evidence(2, Phase.COMPUTE)
    assert judge([*reading, third, *(evidence(rank) for rank in range(3, 8))]).kind == "shared"


def test_never_more_than_half_are_replaced() -> None:
    late = [evidence(0, Phase.DATA), evidence(1, Phase.COMPUTE)]
    assert judge(late).kind == judge([*late, evidence(2)]).kind == "shared"
    assert judge([*late, evidence(2), evidence(3)]).stuck == (0, 1)
    stopped = [evidence(rank, state="T") for rank in range(3)]
    assert judge([*stopped, evidence(3)]).stuck == (0, 1)
    assert judge(stopped).kind == "shared", "whoever stops all of them may let them go on"
    assert judge(stopped[:1]).stuck == (0,)
    behind = [evidence(rank, step=40) for rank in range(3)]
    assert judge([*behind, evidence(3)]).stuck == (0, 1)


def test_a_stall_that_reaches_one_after_the_other_is_no_fault_of_the_first() -> None:
    first, second = evidence(0, Phase.DATA), evidence(1, Phase.DATA, silent_s=58.0)
    assert judge([first, second, evidence(2)]).kind == "slow"
    busy = evidence(1, Phase.DATA, silent_s=2.0)
    assert judge([first, busy, evidence(2)]).stuck == (0,)


def test_a_stopped_rank_is_named_wherever_it_was() -> None:
    verdict = judge([evidence(0), evidence(1, state="T"), evidence(2, Phase.DATA)])
    assert (verdict.kind, verdict.stuck) == ("stopped", (1,))
    assert verdict.sentence == (
        "rank 1 on node1 is stopped (SIGSTOP) in step 41, waiting for the others, and has not moved for 1 min 00 s; "
        "it has served 41 batches, the others 41."
    )


def test_a_rank_that_is_gone() -> None:
    verdict = judge([evidence(0), evidence(1, Phase.COMPUTE, state="X")])
    assert (verdict.kind, verdict.stuck) == ("stopped", (1,))
    assert verdict.sentence.startswith("rank 1 on node1 is gone; ")


def test_a_deadlock_of_all_blames_nobody() -> None:
    verdict = judge(
        [
            evidence(0, pending=(ALL_REDUCE,)),
            evidence(1, pending=(BARRIER,), threads=(IN_LOOP,)),
            evidence(2, pending=(ALL_REDUCE,)),
        ]
    )
    assert verdict == Verdict(
        "deadlock",
        (),
        "all 3 ranks wait for each other in step 41, for 1 min 00 s: rank 0 in all_reduce (collective 12), "
        "rank 1 in barrier (collective 12) at train.py:50 in main, rank 2 in all_reduce (collective 12).",
    ), verdict.sentence


def test_ranks_that_wait_in_different_operations_are_told_apart() -> None:
    verdict = judge([evidence(0), evidence(1, kind=OperationKind.EVALUATE)])
    assert verdict.kind == "deadlock"
    assert (
        "rank 0 in an exchange in step 41, rank 1 in an exchange in the evaluation at step 41"
        in verdict.sentence
    )


def test_a_rank_still_in_a_step_that_others_have_left() -> None:
    verdict = judge([evidence(0), evidence(1, step=40, pending=(ALL_REDUCE,))])
    assert (verdict.kind, verdict.stuck) == ("stuck", (1,))
    assert "is still in the gradient reduction of step 40, which others have left" in verdict.sentence


def test_a_rank_that_left_training_while_others_wait() -> None:
    verdict = judge([evidence(0, pending=(ALL_REDUCE,)), evidence(1, Phase.ENDED)])
    assert (verdict.kind, verdict.stuck) == ("deadlock", ())
    assert verdict.sentence.startswith(
        "rank 1 on node1 is done with training, but rank 0 on node1 still waits in step 41"
    )


def test_a_rank_within_its_own_limit_is_only_slow() -> None:
    verdict = judge(
        [evidence(0), evidence(1, Phase.COMPUTE, kind=OperationKind.SAVE, silent_s=90.0, limit_s=600.0)]
    )
    assert (verdict.kind, verdict.stuck) == ("slow", ())
    assert "rank 1 on node1" in verdict.sentence
    assert "the checkpoint of step 41" in verdict.sentence


def test_a_saving_rank_is_not_blamed_for_a_stuck_one() -> None:
    saving = evidence(0, Phase.COMPUTE, silent_s=90.0, limit_s=600.0)
    assert judge([saving, evidence(1, Phase.DATA)]).stuck == (1,)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_verdict_is_one_sentence_and_travels(count: int) -> None:
    found = [evidence(rank, Phase.COMPUTE, threads=(IN_LOOP,)) for rank in range(count)]
    assert judge(pickle.loads(pickle.dumps(found))) == judge(found)  # noqa: S301
    sentence = judge(found).sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert ". " not in sentence


def test_the_users_line_is_neither_ours_nor_a_librarys() -> None:
    assert is_users(Frame("/home/me/digits.py", 1, "f"))
    assert is_users(Frame(f"{PACKAGE}/tasks/digits.py", 1, "f"))
    for file in (
        f"{PACKAGE}/data/reading.py",
        f"{STANDARD}/threading.py",
        "/opt/env/lib/python3.13/site-packages/torch/nn/modules/module.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "<frozen runpy>",
    ):
        assert not is_users(Frame(file, 1, "f")), file


def test_without_a_line_of_the_users_the_innermost_one_is_shown() -> None:
    inner = Frame(f"{STANDARD}/selectors.py", 415, "select")
    assert evidence(0, threads=((inner, Frame("<frozen runpy>", 1, "run")),)).place == inner


def test_only_reading_data_looks_at_other_threads() -> None:
    threads = ((Frame(f"{STANDARD}/queue.py", 1, "get"),), IN_GETITEM)
    assert evidence(0, Phase.DATA, threads=threads).place == IN_GETITEM[0]
    assert evidence(0, Phase.COMPUTE, threads=threads).place == threads[0][0]


def test_the_main_thread_comes_first_also_when_another_took_the_signal() -> None:
    inside, release = threading.Event(), threading.Event()

    def wait_here() -> None:
        inside.set()
        release.wait()

    other = threading.Thread(target=wait_here)
    other.start()
    inside.wait()
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        text = file.read().decode()
    release.set()
    other.join()
    swapped = (
        text.replace("Current thread", "A thread")
        .replace("Thread", "Current thread")
        .replace("A thread", "Thread")
    )
    for dump in (text, swapped):
        threads = parse_stacks(dump)
        assert threads[0][0].function == "test_the_main_thread_comes_first_also_when_another_took_the_signal"
        assert threads[0][0].file == __file__
        # The process that runs the tests may have threads of its own.
        assert any("wait_here" in {frame.function for frame in thread} for thread in threads[1:])


def test_of_too_many_threads_the_one_that_took_the_signal_is_the_main_one() -> None:
    one = 'Thread 0x00007f00 (most recent call first):\n  File "/home/me/other.py", line 1 in work\n\n'
    main = 'Current thread 0x00007f01 [main] (most recent call first):\n  File "/home/me/train.py", line ??? in main\n\n'
    threads = parse_stacks(one * 50 + main + one * 49 + "...\n")
    assert len(threads) == 100
    assert threads[0] == (Frame("/home/me/train.py", 0, "main"),)


def test_no_dump_gives_no_stack() -> None:
    assert parse_stacks("") == ()
    assert parse_stacks("epoch 3 of 5\n") == ()

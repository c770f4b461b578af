"""A lost peer is told by where it was noticed, not by words alone."""

from pathlib import Path

import pytest
import torch

import paceline
from paceline.launch import failures
from paceline.world.peer_failure_messages import names_a_lost_peer

TORCH, OURS = Path(torch.__file__).parent, Path(paceline.__file__).parent
CLOSED = "Connection closed by peer"


def raised_in(file, words=CLOSED, kind=RuntimeError):
    """An exception whose innermost frame is in a file, reached through the code of a user."""
    space = {"kind": kind, "words": words}
    exec(compile("def fail():\n    raise kind(words)", str(file), "exec"), space)  # noqa: S102
    with pytest.raises(kind) as seen:
        space["fail"]()
    return seen.value


@pytest.mark.parametrize(
    ("file", "lost"),
    [
        (TORCH / "distributed" / "distributed_c10d.py", True),
        (TORCH / "nn" / "parallel" / "distributed.py", True),
        (TORCH / "autograd" / "graph.py", True),
        (TORCH / "_ops.py", True),
        (OURS / "world" / "pending.py", True),
        (OURS / "strategies" / "ddp.py", True),
        # Where a loading process of the user's raised, it is raised once more in one of these.
        (TORCH / "_utils.py", False),
        (TORCH / "utils" / "data" / "dataloader.py", False),
        (OURS / "data" / "map_style.py", False),
        ("/home/user/train.py", False),
        ("/home/user/torch/distributed/mine.py", False),
    ],
)
@pytest.mark.parametrize("words", [CLOSED, "timed out waiting for the server", "write: Broken pipe"])
def test_the_same_words_count_only_where_workers_talk(file, lost, words):
    error = raised_in(file, words)
    assert names_a_lost_peer(error) is lost
    assert failures.from_exception(error, 0, "here").kind == ("peer" if lost else "code")


def test_other_words_and_other_exceptions_never_count():
    assert not names_a_lost_peer(raised_in(TORCH / "distributed" / "x.py", "shapes differ"))
    assert not names_a_lost_peer(raised_in(TORCH / "distributed" / "x.py", kind=ConnectionError))


def test_the_words_of_the_library_count_where_a_handle_is_waited_for():
    words = f"[../third_party/gloo/gloo/transport/tcp/pair.cc:547] {CLOSED} [127.0.0.1]:1234"
    assert names_a_lost_peer(raised_in("/home/user/train.py", words))


class MuteError(RuntimeError):
    def __str__(self):
        raise ValueError("no words")


def test_words_that_cannot_be_written_or_asked_for_do_not_hide_the_failure():
    odd = failures.from_exception(raised_in("/home/user/train.py", "\udc80.png"), 0, "here")
    assert odd.message == r"RuntimeError: \udc80.png"
    odd.trace.encode()
    mute = failures.from_exception(raised_in("/home/user/train.py", kind=MuteError), 0, "here")
    assert (mute.kind, mute.message) == ("code", "MuteError: <its words cannot be shown: ValueError>")
    assert "train.py" in mute.trace

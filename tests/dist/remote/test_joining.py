"""`paceline run --roles`: a script that joins the others by itself."""

import json

import pytest

from tests.dist.cli.conftest import command, folder  # noqa: F401
from tests.dist.launch.processes import run_python
from tests.dist.launch.test_joining import TORCHRUN

SCRIPT = """
import os, pathlib, sys
from paceline import remote

@remote.service
class Greeter:
    def greet(self, name): return f"{remote.current().name} greets {name}"

with remote.join(**({"roles": "trainers=1,servers=1", "secret": sys.argv[1]} if sys.argv[1:] else {})) as session:
    if session.role == "trainers":
        said = remote.create("server:0", Greeter).greet(session.name)
        pathlib.Path(f"said-{session.rank}").write_text(said)
        print(said)
"""


def test_a_script_with_roles(command, folder):  # noqa: F811
    (folder / "greet.py").write_text(SCRIPT)
    ended = command("run", "--roles", "trainers=2,servers=1", "--out", "run", "greet.py")
    assert (ended.status, ended.out, ended.err) == (0, "server:0 greets trainer:0\n", "")
    assert (folder / "said-1").read_text() == "server:0 greets trainer:1"
    spec = json.loads((folder / "run" / "spec.json").read_text())
    assert (spec["roles"], spec["workers"]) == ("trainers=2,servers=1", 3)
    assert "SECRET" not in str(spec)


def test_options_that_contradict_each_other(command, folder):  # noqa: F811
    (folder / "greet.py").write_text(SCRIPT)
    for arguments, words in (
        (["--roles", "trainers=2,servers=1", "-n", 2], "makes 3 workers, but --workers is 2"),
        (["--roles", "trainers=2,servers"], "'servers' in 'trainers=2,servers' is no role"),
        (["--roles", "trainers=2", "--interface", "nowhere9"], "no network interface 'nowhere9'"),
        (["--interface", "lo"], "Give --roles, or leave it out"),
    ):
        ended = command("run", *arguments, "greet.py")
        assert words in ended.err
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)


def test_a_script_without_roles_is_told(command, folder):  # noqa: F811
    (folder / "greet.py").write_text(SCRIPT)
    ended = command("run", "greet.py")
    assert "nobody said which roles there are" in ended.err
    assert ended.status == 2


def test_workers_that_know_only_their_ranks_say_the_rest_themselves(command, folder):  # noqa: F811
    (folder / "greet.py").write_text(SCRIPT)
    ended = command("run", "-n", 2, "greet.py", "a secret")
    assert (ended.status, ended.out, ended.err) == (0, "server:0 greets trainer:0\n", "")


def test_a_worker_with_another_secret_is_not_worked_with(command, folder):  # noqa: F811
    (folder / "greet.py").write_text(SCRIPT.replace("sys.argv[1]}", "os.environ['RANK']}"))
    ended = command("run", "-n", 2, "greet.py", "a secret")
    assert (
        "CallRefusedError: trainer:0 does not know" in ended.err
        or "CallRefusedError: server:0 does not" in ended.err
    )
    assert (ended.status, ended.out) == (1, "")
    assert not (folder / "said-0").exists()


TWICE = """
import pathlib
from paceline import remote

@remote.service
class Greeter:
    def __init__(self, word): self.word = word
    def greet(self, name): return f"{self.word} {name}"

said = []
for word in ("hello", "goodbye", "again"):
    with remote.join(roles="trainers=1,servers=1", secret="a secret", timeout_s=30) as session:
        if session.role == "trainers":
            said.append(remote.create("server:0", Greeter, word).greet(session.name))
pathlib.Path(f"said-{session.rank}").write_text(str(said))
"""


@pytest.mark.parametrize("launcher", ["torchrun", "paceline run"])
def test_a_process_that_joins_again_meets_nothing_of_the_session_before(launcher, command, folder):  # noqa: F811
    (folder / "twice.py").write_text(TWICE)
    if launcher == "torchrun":
        ended = run_python(folder, *TORCHRUN, "twice.py")
        assert ended.returncode == 0, ended.stderr
    else:
        ended = command("run", "-n", 2, "twice.py")
        assert (ended.status, ended.err) == (0, "")
    assert (folder / "said-0").read_text() == "['hello trainer:0', 'goodbye trainer:0', 'again trainer:0']"
    assert (folder / "said-1").read_text() == "[]"


ENDS = """
import os, pathlib, sys
import paceline
from paceline import remote

for number in range(3):
    try:
        with remote.join(roles="trainers=1,servers=1", secret="one") as session:
            if session.rank == 1 and number == 1:
                exec(sys.argv[1])
    except paceline.PacelineError as error:
        pathlib.Path(f"said-{number}").write_text(str(error))
"""


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_in_a_session_is_not_waited_for_there_nor_in_the_next(command, folder, end):  # noqa: F811
    (folder / "ends.py").write_text(ENDS)
    ended = command("run", "-n", 2, "ends.py", end)
    assert ended.status == 0, ended.err
    assert not (folder / "said-1").exists()
    assert (folder / "said-2").read_text().endswith("has ended and will not come to this call")

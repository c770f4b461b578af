"""`paceline rollouts`: what it prints, and the one line for what it cannot do."""

import importlib.util
import json
import sys

import pytest
from safetensors.torch import load_file

from paceline.checkpoint.fingerprint import weights_sha256
from paceline.cli import main
from paceline.cli.cartpole.policy import Network


def ended(capsys, *arguments):
    status = main._command([*map(str, arguments)])
    return status, *capsys.readouterr()


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="needs gymnasium")
def test_a_result_for_programs(capsys, tmp_path):
    out = tmp_path / "run"
    status, said, _ = ended(
        capsys, "rollouts", "cartpole", "--episodes", 3, "--observers", 1, "--json", "--out", out
    )
    found = json.loads(said.splitlines()[-1])
    assert status == 0
    assert (found["task"], found["episodes"], found["observers"]) == ("cartpole", 3, 1)
    assert len(found["returns"]) == 3
    assert found["out"] == str(out)
    network = Network()
    network.load_state_dict(load_file(found["model"]))
    assert weights_sha256(network.state_dict()) == found["weights_sha256"]
    assert (out / "logs" / "rank-0.log").exists()


def test_without_gymnasium_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    status, said, problem = ended(capsys, "rollouts", "cartpole")
    assert (status, said) == (2, "")
    assert problem == (
        'error: cartpole needs gymnasium, which is not installed. Install it with: pip install "paceline[rl]"\n'
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollouts", "cart"], "unknown game 'cart'. Did you mean 'cartpole'?"),
        (["rollouts", "cartpole", "--observers", "0"], "--observers is 0"),
        (["rollouts", "cartpole", "--episodes", "0"], "--episodes is 0"),
        (["rollouts", "cartpole", "--seed", "-1"], "--seed is -1"),
        (["rollouts", "cartpole", "--strategy", "ddp"], "No such option: --strategy"),
        (["train", "cartpole"], "Start it with: paceline rollouts cartpole"),
    ],
)
def test_what_makes_no_sense_is_one_line(capsys, arguments, words):
    status, said, problem = ended(capsys, *arguments)
    assert (status, said) == (2, "")
    assert words in problem
    assert problem.count("\n") == 1

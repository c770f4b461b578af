"""The options of the commands come from the classes of options."""

import re
from dataclasses import fields

import pytest

from paceline.cli import main
from paceline.cli.verify import WITHOUT_EFFECT
from paceline.launch.submit.options import SubmitOptions
from paceline.option_fields import GROUPS, flag, shown
from paceline.strategies.tuning import Tuning
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec

EVERY = [one for kind in (RunOptions, Tuning, TrainSpec) for one in fields(kind) if shown(one)]


@pytest.fixture
def helps(capsys, monkeypatch):
    def show(command):
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr("sys.argv", ["paceline", command, "--help"])
        with pytest.raises(SystemExit):
            main.run()
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize(("command", "left_out"), [("train", ()), ("verify", WITHOUT_EFFECT)])
def test_every_option_with_an_effect_is_in_the_help_of_train_and_of_verify(command, left_out, helps):
    text = helps(command)
    for one in EVERY:
        listed = re.search(rf"^  {flag(one.name)}\b", text, re.MULTILINE) is not None
        assert listed == (one.name not in left_out), one.name
        if listed and isinstance(one.default, bool):
            assert f"--no-{flag(one.name)[2:]}" in text


def test_the_help_has_groups_common_ones_first(helps):
    headings = re.findall(r"^(\S.*):$", helps("train"), re.MULTILINE)
    assert headings[: len(GROUPS) + 1] == ["Arguments", *GROUPS]
    assert {"Strategy ddp", "Strategy fsdp", "Strategy pp", "Strategy tp", "Strategy local-sgd"} <= set(
        headings
    )


def test_submit_takes_the_options_of_train_but_for_those_that_its_job_decides(helps):
    text = helps("submit")
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings[: len(GROUPS) + 1] == ["Arguments", *GROUPS]
    assert {"SLURM", "Kubernetes"} <= set(headings)
    for one in [*EVERY, *(one for one in fields(SubmitOptions) if shown(one))]:
        listed = re.search(rf"^  {flag(one.name)}\b", text, re.MULTILINE) is not None
        assert listed == (one.name not in ("rendezvous", "lead", "secret_file")), one.name


def test_defaults_are_in_the_help(helps):
    text = " ".join(helps("train").split())
    assert "How many checkpoints are kept. Default: 3." in text
    assert "First steps that are taken together. Default: 0." in text
    assert "Release gathered weights after the forward pass. Default: yes." in text

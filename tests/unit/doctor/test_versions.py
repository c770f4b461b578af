"""Which packages fit: read from what is really installed."""

import re
from importlib import metadata

import pytest

from paceline.doctor import versions
from paceline.doctor.finding import Level
from paceline.version import __version__


def test_what_is_installed_fits():
    (found,) = versions.packages()
    assert found.level is Level.OK
    assert found.facts["paceline"] == __version__
    assert found.facts["torch"] == metadata.version("torch")
    assert versions.curve() == []


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        ("torch>=99", "but paceline .* was made for torch>=99"),
        ("torch<2,>=1.9", "was made for torch<2,>=1.9"),
        ("numpy (!=0.1,<1)", "was made for numpy!=0.1,<1"),
        ("paceline-of-the-future>=3", "paceline-of-the-future is not installed"),
    ],
)
def test_what_does_not_fit_is_a_fault(requirement, words):
    found = versions._unfit(requirement)
    assert found is not None
    assert found.level is Level.FAIL
    assert found.remedy.startswith("Install")
    assert re.search(words, found.what)


@pytest.mark.parametrize(
    "requirement", ["torch", "torch>=2.11,<99", "numpy != 0.1", "tensorboard>=99; extra == 'tensorboard'"]
)
def test_what_fits_or_is_optional_is_not(requirement):
    assert versions._unfit(requirement) is None


def test_numbers_are_compared_as_numbers():
    assert versions._holds(">=", versions._release("2.13.0+cpu"), versions._release("2.9"))
    assert versions._holds("==", versions._release("26"), versions._release("26.0"))
    assert not versions._holds("<", versions._release("2.14.0a0"), versions._release("2.14"))

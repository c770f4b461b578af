"""What a call may be given beside its arguments."""

import math

import pytest

from paceline import remote
from paceline.errors import InputError
from paceline.remote.calls import Method


@remote.function
@remote.idempotent
def answer() -> int:
    """Return something."""
    return 42


@pytest.mark.parametrize("timeout", ["3", math.nan, 0, -1.5, [2]])
def test_a_time_out_is_a_number_of_seconds(timeout):
    method = Method("other", 0, (), answer)
    with pytest.raises(InputError, match=r"timeout is .*, but must be a number of seconds above 0\.$"):
        method.options(timeout=timeout)
    assert method.options(timeout=math.inf)._timeout_s == math.inf


@pytest.mark.parametrize("retries", [-1, "2", 1.5])
def test_retries_are_counted(retries):
    with pytest.raises(InputError, match=r"retries is .*, but must be a whole number of at least 0\.$"):
        Method("other", 0, (), answer).options(retries=retries)

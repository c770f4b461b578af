"""Every test is watched for what it leaves behind."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import leaks

# How long an example takes says more about the machine than about the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Orphans come to us instead of to init, so that a worker whose parent died is seen as well.
_PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if importlib.util.find_spec("xdist"):  # machines that are lent for a test or two may lack it
    from tests.groups import pytest_xdist_make_scheduler  # noqa: F401


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, open file, variable, directory or shared memory behind."""
    before = leaks.look()
    yield
    found = leaks.find(before, request.node.funcargs.get("tmp_path"))
    if found:
        leaks.restore(before)
        pytest.fail("the test leaves behind: " + "; ".join(found), pytrace=False)

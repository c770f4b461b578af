"""Every test is watched for what it leaves behind."""

from __future__ import annotations

import ctypes
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


# Tests of one group run in one process, one after the other: they share what is expensive, or what there is one of.
_GROUPS = {
    "tests/contract/": "contract",
    "tests/dist/docs/": "documents",
    "tests/fault/test_machines.py": "namespaces",
    "tests/unit/launch/test_link.py": "namespaces",
    "tests/unit/launch/test_rendezvous.py": "namespaces",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep each file together where tests run in several processes."""
    for item in items:
        path = item.nodeid.partition("::")[0]
        group = next((name for start, name in _GROUPS.items() if path.startswith(start)), path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, open file, variable, directory or shared memory behind."""
    before = leaks.look()
    yield
    found = leaks.find(before, request.node.funcargs.get("tmp_path"))
    if found:
        leaks.restore(before)
        pytest.fail("the test leaves behind: " + "; ".join(found), pytrace=False)

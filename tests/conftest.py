"""Every test is watched for what it leaves behind."""

from __future__ import annotations

import ctypes
import importlib.util
import secrets
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from paceline.launch.workers import fork_server as forkserver
from tests import leaks
from tests.shares import pytest_addoption, pytest_configure  # noqa: F401

# How long an example takes says more about the machine than about the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Orphans come to us instead of to init, so that a worker whose parent died is seen as well.
_PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if importlib.util.find_spec("xdist"):  # machines that are lent for a test or two may lack it
    from tests.groups import pytest_xdist_make_scheduler  # noqa: F401


# What test modules import at their top: a worker that calls a function of one would import it by itself, 0.3 s each time.
_LOADED = ("pytest",)
_warm: weakref.ref[forkserver.ForkServer] | None = None


@pytest.fixture(autouse=True)
def warm_fork_server() -> None:
    """Have a fork server that a test left behind load what workers of the next ones need."""
    global _warm  # noqa: PLW0603
    server = forkserver._shared
    if server is not None and (_warm is None or _warm() is not server) and server.alive():
        server.load(_LOADED)
        _warm = weakref.ref(server)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, open file, variable, directory or shared memory behind."""
    before = leaks.look()
    yield
    found = leaks.find(before, request.node.funcargs.get("tmp_path"))
    if found:
        leaks.restore(before)
        pytest.fail("the test leaves behind: " + "; ".join(found), pytrace=False)


@pytest.fixture
def ray_variables() -> Iterator[dict[str, str]]:
    """Variables for a Ray of the test's own: its files and its token lie in a folder that goes, and not in the user's home."""
    with tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp"
    ) as folder:  # the path of a socket must be short
        token = Path(folder, "token")
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        yield {
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

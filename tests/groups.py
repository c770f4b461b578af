"""Which tests go together where several processes run them."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Tests of one group run in one process, one after the other: they share what is expensive, or what there is one of.
_GROUPS = {
    "tests/contract/": "contract",
    "tests/dist/docs/": "documents",
    "tests/fault/test_machines": "namespaces",
    "tests/unit/launch/test_link.py": "namespaces",
    "tests/unit/launch/test_rendezvous.py": "namespaces",
}


class _ByGroup(LoadScopeScheduling):
    """Deals out groups, and every other file as one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return next((name for start, name in _GROUPS.items() if path.startswith(start)), path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Decide which tests go together where several processes run them."""
    return _ByGroup(config, log)

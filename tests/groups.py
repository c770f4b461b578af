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
}
# What takes longest is dealt out first, so that no process is left alone with it at the end.
_LONGEST_FIRST = (
    "namespaces",  # waits for the most part: what is computed beside it has both cores
    "documents",
    "contract",
    "tests/dist/launch/test_slurm.py",  # waits for SLURM for the most part
    "tests/dist/strategies/test_tensor.py",
    "tests/fault/test_survive.py",
    "tests/dist/strategies/test_ordinary_code.py",
    "tests/zoo/test_zoo.py",
    "tests/fault/test_chaos.py",
    "tests/fault/test_interrupt.py",
    "tests/fault/test_survive_cut.py",
    "tests/dist/strategies/test_fsdp.py",
    "tests/dist/strategies/test_pipeline.py",
    "tests/dist/checkpoint/test_any_to_any.py",
    "tests/dist/strategies/test_parameter_server.py",
    "tests/dist/verify/test_tasks.py",
    "tests/dist/verify/test_shards_and_resumes.py",
    "tests/dist/verify/test_receipt.py",
    "tests/dist/bitwise/test_same_bits.py",
    "tests/dist/bitwise/test_resume_and_loading.py",
    "tests/dist/strategies/test_no_gradient.py",
    "tests/dist/strategies/test_hybrid.py",
    "tests/dist/strategies/test_local_sgd.py",
    "tests/dist/strategies/test_compress.py",
    "tests/dist/strategies/test_recompute.py",
    "tests/dist/strategies/test_partial_update.py",
    "tests/dist/launch/test_joining.py",
    "tests/dist/world/test_mpi.py",
    "tests/dist/cli/test_bad_input.py",
    "tests/dist/cli/test_shards.py",
    "tests/fault/test_hang.py",
)


class _ByGroup(LoadScopeScheduling):
    """Deals out groups, and every other file as one."""

    def _assign_work_unit(self, node: Any) -> None:
        longest = next((scope for scope in _LONGEST_FIRST if scope in self.workqueue), None)
        if longest is not None:
            self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return next((name for start, name in _GROUPS.items() if path.startswith(start)), path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Decide which tests go together where several processes run them."""
    return _ByGroup(config, log)

"""Runs `torch.testing._internal.distributed.distributed_test` on ranks of MPI, and prints what passed, what failed and why.

The tests that torch has for gloo on the CPU are taken, because it has most of them there; the group is ours. Ranks are
started by mpiexec and take test after test. Where one fails or hangs, they are ended and new ones go on with the next.
torch's tests need `pip install expecttest`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = 4
OPERATION_S = 20
"""How long an operation may take: a rank that fails leaves the others in one."""
SILENCE_S = 90.0
"""A test that takes longer hangs."""
NOT_OURS = {
    "monitored_barrier": "torch has monitored_barrier for gloo alone",
    "_gloo": "about gloo itself",
    "sparse": "MPI carries dense tensors",
    "stateless_api": "needs a build of torch with its own MPI, or CUDA",
    "ddp_buffer_hook_allreduce": "hook of gloo and nccl",
    "undefined_backend": "about torch's default backends",
    "get_backend": "compares with the name gloo",
    "barrier_timeout_global": "makes a group of gloo's by itself",
    "batch_isend_irecv_mixed_backend_err": "needs nccl",
    "batch_isend_irecv_op_err": "needs CUDA, and does not look whether it is there",
    "SyncBatchNorm_process_group": "needs torchvision, and does not look whether it is there",
    "all_to_all_cuda": "needs CUDA, and does not look whether it is there",
    "all_to_all_full_group_cuda": "needs CUDA, and does not look whether it is there",
    "all_to_all_group_cuda": "needs CUDA, and does not look whether it is there",
}


def main() -> int:
    """Run all tests, or those whose name contains a word; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    parser.add_argument("word", nargs="?", default="test_")
    parser.add_argument("--names", help=argparse.SUPPRESS)
    parser.add_argument("--told", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.names is not None:
        from tests.torch_suite.ranks import run

        run(json.loads(given.names), Path(given.told))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return _report(_run_all(given.word, Path(folder)))


def _names(word: str) -> list[str]:
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS))
    from tests.torch_suite.ranks import names

    return [name for name in names() if word in name]


def _run_all(word: str, folder: Path) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    waiting = []
    for name in _names(word):
        reason = next((why for part, why in NOT_OURS.items() if part in name), None)
        if reason is None:
            waiting.append(name)
        else:
            found[name] = ("not ours", reason)
    while waiting:
        told = folder / "told.jsonl"
        told.unlink(missing_ok=True)
        _run_batch(waiting, told, folder)
        lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
        for line in lines:
            found[line["test"]] = (line["outcome"], line["why"])
            print(f"{line['outcome']:8} {line['test']}  {line['why'][:140]}", flush=True)
        waiting = waiting[len(lines) :]
        if waiting and not (lines and lines[-1]["ends"]):
            found[waiting[0]] = ("failed", "it hung, or ended the process")
            print(f"failed   {waiting[0]}  it hung, or ended the process", flush=True)
            waiting = waiting[1:]
    return found


def _run_batch(names: list[str], told: Path, folder: Path) -> None:
    command = ["-m", "tests.torch_suite", "--names", json.dumps(names), "--told", str(told)]
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    environment = {
        **os.environ,
        "BACKEND": "gloo",
        "WORLD_SIZE": str(RANKS),
        "TEMP_DIR": tempfile.mkdtemp(dir=folder),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "output.txt").open("wb") as output:
        started = subprocess.Popen(
            [mpiexec, "-n", str(RANKS), sys.executable, *command],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        size = -1
        while True:
            try:
                started.wait(SILENCE_S)
            except subprocess.TimeoutExpired:
                now = told.stat().st_size if told.exists() else 0
                if now != size:
                    size = now
                    continue
                started.terminate()
                started.wait()
            return


def _report(found: dict[str, tuple[str, str]]) -> int:
    counts = collections.Counter(outcome for outcome, _ in found.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    reasons = collections.Counter(why for outcome, why in found.values() if outcome != "passed")
    for why, count in reasons.most_common():
        print(f"{count:4}  {why[:200]}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

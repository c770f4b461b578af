"""Workers whose CPUs give torch other instructions compute other bits: refused where bits are promised."""

import os

import pytest

from tests.dist.launch.processes import run_python
from tests.dist.launch.test_joining import TORCHRUN

SCRIPT = """
import os, sys
if os.environ["RANK"] == "1":
    os.environ["ATEN_CPU_CAPABILITY"] = "default"  # torch reads it once
import torch
import paceline

class Fit(paceline.Task):
    batch_size, shards = 4, 2

    def model(self): return torch.nn.Linear(1, 1)

    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_data(self): return [torch.tensor([float(number)]) for number in range(8)]  # drawn, it would differ, too

    def loss(self, model, batch): return paceline.Loss.mean(model(batch)[:, 0])

if __name__ == "__main__":
    paceline.train(Fit, steps=1, threads=1, progress=False, exact=sys.argv[1])
"""


@pytest.mark.parametrize("exact", ["bitwise", "numeric"])
def test_workers_with_other_instructions_promise_no_bits(exact, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run_python(
        tmp_path, *TORCHRUN, "script.py", exact, env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    )
    if exact == "numeric":
        assert ended.returncode == 0, ended.stderr
        return
    assert ended.returncode != 0
    assert "torch chooses other kernels there" in ended.stderr
    assert "Use machines of one kind, or " in ended.stderr

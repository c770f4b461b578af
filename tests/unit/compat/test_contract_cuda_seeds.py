"""Seeds of CUDA's generators that torch keeps until CUDA is in use."""

import subprocess
import sys

from tests.patience import HANG_S
from tests.unit.compat.contracts import leans_on

# In a process of its own, in which CUDA is not in use whatever ran before.
KEPT = """
import torch
from paceline.compat import cuda_seeds

def seeds(): return [call.__closure__[0].cell_contents for call in cuda_seeds.waiting().seeds]
def states(): return [call for call, _ in cuda_seeds.waiting().states]

others = [one for one in torch.cuda._queued_calls]
assert not cuda_seeds.waiting().states and not seeds()
torch.manual_seed(1)
torch.cuda.manual_seed(5)
torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))
before, (state,) = cuda_seeds.waiting(), states()
assert seeds() == [1, 5]
torch.cuda.set_rng_state(torch.ones(16, dtype=torch.uint8))
torch.manual_seed(9)
assert seeds() == [5, 9] and len(states()) == 2
before.put_back()
assert seeds() == [1, 5] and states() == [state]
assert torch.cuda._queued_calls[:len(others)] == others
"""


@leans_on("torch.cuda._lazy_seed_tracker", "torch.cuda._queued_calls", "torch.cuda.random")
def test_what_is_kept_for_generators_of_cuda_can_be_put_back() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ended.returncode == 0, ended.stderr

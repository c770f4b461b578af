"""The stand-in for torch's compiler: unnoticed until it is needed, and then gone."""

import subprocess
import sys

from tests.patience import HANG_S
from tests.unit.compat.contracts import leans_on

BEGIN = """
import sys
import torch
from torch import nn
from paceline.compat import dynamo
assert "torch._dynamo" not in sys.modules
dynamo.install()
def loaded(): return type(sys.modules["torch._dynamo"]).__name__ != "_StandIn"
"""
QUIET = """
model = nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
# Asks every module for its __file__, in the middle of imports that the compiler itself needs.
torch.testing.assert_close(torch.ones(2), torch.ones(2))
import torch.distributed.tensor
assert not loaded()
"""
NEEDED = """
import torch._dynamo.config
assert loaded()
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


@leans_on(
    "torch:_dynamo",
    "torch:__dynamo_disable",
    "torch:_dynamo.graph_break",
    "torch:_dynamo.utils.get_optimize_ddp_mode",
    "torch:_dynamo.trace_rules.clear_lru_cache",
)
def test_the_compiler_is_loaded_only_when_it_is_needed():
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + QUIET + NEEDED],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr

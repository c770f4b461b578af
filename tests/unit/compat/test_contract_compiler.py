"""Torch's compiler, as `--compile` leans on it: graphs compiled in pieces, and what they would give without memory."""

import os
import subprocess
import sys

import torch
from torch import nn

from paceline.compat import modules
from tests.patience import HANG_S
from tests.unit.compat.contracts import leans_on

# In a process of its own: torch's compiler leaves threads and variables behind.
PIECES = """
import torch
from torch import nn
from paceline.compat import graphs
graphs.allow_graphs(64)
shown = []
def backend(graph, inputs):
    shown.extend(graphs.outputs_without_memory(graph, inputs))
    return graphs.compile_graph(graph, inputs, piece_bytes=64, repeatable=True, passes_once=False, cached=True)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
def average(values): return model(values).mean()
total = torch.compile(average, backend=backend, dynamic=False)(torch.ones(2, 4))
assert graphs.captured() == (1, []), graphs.captured()
from torch._dynamo import config
assert config.skip_nnmodule_hook_guards
graphs.guard_hooks()
assert not config.skip_nnmodule_hook_guards
assert shown[0].grad_fn.name() == "MeanBackward0", shown
names = [total.grad_fn.name(), *(node.name() for node, _ in total.grad_fn.next_functions if node is not None)]
assert names.count("CompiledFunctionBackward") == 2, names
"""


@leans_on(
    "torch:_dynamo.config.recompile_limit",
    "torch:_dynamo.config.skip_nnmodule_hook_guards",
    "torch:_dynamo.backends.distributed.DDPOptimizer",
    "torch:_dynamo.utils.counters",
    "torch:_functorch.config.donated_buffer",
    "torch:_inductor.config.patch",
    "torch:_inductor.compile_fx.compile_fx",
    "torch:_subclasses.fake_tensor.FakeTensorMode",
)
def test_a_graph_is_compiled_in_pieces_that_go_back_one_after_another():
    ended = subprocess.run(
        [sys.executable, "-c", PIECES], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ended.returncode == 0, ended.stderr


@leans_on("torch.nn:Module._call_impl", "torch.nn:Module._compiled_call_impl")
def test_calls_of_a_module_go_elsewhere():
    model = nn.Linear(1, 1)
    modules.replace_call(model, lambda value: -modules.plain_call(model)(value))
    one = torch.ones(1, 1)
    assert model(one).item() == -model.forward(one).item()


SWITCHES = """
from paceline.compat import compiler_setting
with compiler_setting.preserved():
    from torch._inductor import config as inductor
    from torch._dynamo import config as dynamo
    assert inductor.deterministic
    inductor.deterministic, dynamo.recompile_limit, dynamo.skip_nnmodule_hook_guards = False, 99, False
assert (inductor.deterministic, dynamo.recompile_limit, dynamo.skip_nnmodule_hook_guards) == (True, 8, True)
inductor.deterministic, dynamo.recompile_limit = False, 77
with compiler_setting.preserved():
    inductor.deterministic, dynamo.recompile_limit = True, 99
assert (inductor.deterministic, dynamo.recompile_limit) == (False, 77)
"""


@leans_on(
    "torch:_inductor.config.deterministic",
    "torch:_inductor.config:_config",
    "torch:_dynamo.config.accumulated_recompile_limit",
)
def test_switches_of_the_compiler_are_put_back_also_where_it_was_not_loaded_before():
    ended = subprocess.run(
        [sys.executable, "-c", SWITCHES],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env=os.environ | {"TORCHINDUCTOR_DETERMINISTIC": "1"},
    )
    assert ended.returncode == 0, ended.stderr

"""What a script does by itself after a call has the bits that it would have without, also where it is a worker."""

import json
import os

import pytest

from tests.dist.launch.processes import run_python
from tests.dist.launch.test_joining import TORCHRUN

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

SCRIPT = """
import hashlib, json, os, pathlib, pickle, random, sys
import numpy as np, torch
from torch import nn
from torch.utils.data import TensorDataset
import paceline
from paceline.tasks.dense4096 import Dense4096

class Setting:
    width = 4

def main(run, setting):
    assert isinstance(setting, Setting)
    torch.use_deterministic_algorithms(True)
    torch.cuda.manual_seed(6)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    model = nn.Linear(setting.width, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    points = torch.randn(32, 4)
    for step in run.steps(TensorDataset(points, points.sum(1)), batch_size=16, steps=1):
        for x, y in step:
            step.backward((model(x)[:, 0] - y).square())
        step.apply()

def state():
    encoder.eval()
    with torch.no_grad():
        out = encoder(x)
    return {
        "torch": torch.get_rng_state().sum().item(),
        "numpy": [np.random.get_state()[1].sum().item(), np.random.get_state()[2]],
        "random": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "bits": hashlib.sha256(out.numpy().tobytes()).hexdigest(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "threads": torch.get_num_threads(),
        "path": list(sys.path),
        "benchmark": torch.backends.cudnn.benchmark,
        "mode": torch.get_deterministic_debug_mode(),
        "compiler": sys.modules["torch._inductor.config"].deterministic,
        "graphs": [getattr(torch._dynamo.config, name) for name in (
            "recompile_limit", "accumulated_recompile_limit", "skip_nnmodule_hook_guards")],
        "kept for CUDA": [call and call[0].__closure__[0].cell_contents for call in torch.cuda._lazy_seed_tracker.get_calls()],
        "variables": {name: os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "GLOO_SOCKET_IFNAME")},
        "main": len(pickle.dumps(Setting())),
    }

if __name__ == "__main__":
    import torch._dynamo.config, torch._inductor.config
    torch.manual_seed(3), torch.cuda.manual_seed(5), np.random.seed(4), random.seed(5), torch.set_num_threads(3)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2), torch.randn(3, 5, 16)
    told = [state()]
    for _ in range(2):
        paceline.launch(main, Setting(), threads=1)
        told.append(state())
    if sys.argv[1:] != ["brief"]:
        paceline.train(Dense4096, steps=1, threads=2, progress=False, compile=True)
        told.append(state())
        for refused in ({"resume": True}, {"strategy": "tp=7"}, {"shards": 1000}):
            try:
                paceline.train(Dense4096, steps=1, out="nowhere", progress=False, **refused)
            except paceline.InputError:
                told.append(state())
    pathlib.Path("told-" + os.environ.get("RANK", "0") + ".json").write_text(json.dumps(told))
"""


@pytest.mark.parametrize("joined", [ALONE, None], ids=["alone", "torchrun"])
def test_a_script_that_is_a_worker_is_left_as_it_was(joined, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["script.py"] if joined else [*TORCHRUN, "script.py", "brief"]
    ended = run_python(tmp_path, *command, env=os.environ | (joined or {}))
    assert ended.returncode == 0, ended.stderr
    before, *after = json.loads((tmp_path / "told-0.json").read_text())
    assert len(after) == (6 if joined else 2)
    for one in after:
        assert one == before


VERIFY = """
import random
import paceline

if __name__ == "__main__":
    random.seed(1)
    before = random.getstate()
    try:
        paceline.verify("paceline.tasks.dense4096:Dense4096", workers=1, steps=1, resume=False, hash_seed=False)
    finally:
        assert random.getstate() == before
"""


def test_the_first_verify_of_a_process_leaves_its_random_numbers(tmp_path):
    (tmp_path / "script.py").write_text(VERIFY)
    ended = run_python(tmp_path, "script.py")
    assert ended.returncode == 0, ended.stderr


LOADED_INSIDE = """
import os, sys
import torch
import paceline

def main(run):
    torch.use_deterministic_algorithms(False)
    from paceline.compat import graphs
    graphs.guard_hooks()
    graphs.allow_graphs(4096)
    assert not sys.modules["torch._inductor.config"].deterministic

if __name__ == "__main__":
    assert "torch._inductor.config" not in sys.modules
    paceline.launch(main)
    from torch._inductor import config
    assert config.deterministic
    from torch._dynamo import config
    assert (config.recompile_limit, config.accumulated_recompile_limit, config.skip_nnmodule_hook_guards) == (8, 256, True)
"""


def test_a_compiler_that_is_loaded_in_a_launch_is_afterwards_as_it_begins(tmp_path):
    (tmp_path / "script.py").write_text(LOADED_INSIDE)
    ended = run_python(tmp_path, "script.py", env=os.environ | ALONE | {"TORCHINDUCTOR_DETERMINISTIC": "1"})
    assert ended.returncode == 0, ended.stderr

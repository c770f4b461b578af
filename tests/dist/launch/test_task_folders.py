"""Tasks of several folders, trained by one process: workers find what lies beside their own file, as the launcher does."""

import json
import subprocess
import sys

import pytest

from tests.dist.launch.test_joining import TORCHRUN
from tests.patience import HANG_S

TASK = """
import paceline, torch
from torch import nn
from parts.net import SCALE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        nn.init.ones_(self.layer.weight), nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        return self.layer(x) * SCALE

class Scaled(paceline.Task):
    batch_size, shards, epochs = 8, 2, 1

    def model(self):
        return Net()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def train_data(self):
        return torch.ones(8, 4)

    def loss(self, model, batch):
        return paceline.Loss.mean(model(batch).flatten())
"""

SCRIPT = """
import json, os, sys
import paceline, torch
from helpers import OWN
from parts import own

def main(run, net=None):
    return OWN, own.NUMBER, None if net is None else net(torch.ones(1, 4)).item()

if __name__ == "__main__":
    kept, told = {}, []
    for folder in ("three", "two", "one", "two"):
        result = paceline.train(f"tasks/{folder}/task.py:Scaled", progress=False, device="cpu", **json.loads(sys.argv[1]))
        model = result.model()
        kept.setdefault(folder, model)
        told.append([folder, result.history.loss[1], model(torch.ones(1, 4)).item()])
    told += [[folder, model(torch.ones(1, 4)).item()] for folder, model in kept.items()]
    # The one folder's modules go by their names now, and this script has its own ones still.
    told.append(paceline.launch(main, model, device="cpu", **json.loads(sys.argv[1]))[0])
    told.append(main(None))
    with open("told-" + os.environ.get("RANK", "0") + ".json", "w") as file:
        json.dump(told, file)
"""


@pytest.mark.parametrize(
    ("launcher", "options"),
    [((), {"workers": 2}), (TORCHRUN, {})],
    ids=["workers", "torchrun"],
)
def test_each_training_has_the_packages_of_its_own_folder(launcher, options, tmp_path):
    scales = {"three": 7.0, "two": 100.0, "one": 1.0}
    for folder, scale in scales.items():
        parts = tmp_path / "tasks" / folder / "parts"
        parts.mkdir(parents=True)
        (parts / "net.py").write_text(f"SCALE = {scale}")
        (parts.parent / "helpers.py").touch()
        (parts.parent / "task.py").write_text(TASK)
    (tmp_path / "tasks" / "three" / "parts" / "__init__.py").touch()  # which goes before all packages without
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "own.py").write_text("NUMBER = 5")
    (tmp_path / "helpers.py").write_text("OWN = 'the script'")
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, *launcher, "script.py", json.dumps(options)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads((tmp_path / "told-0.json").read_text())
    trained = [[folder, 4 * scales[folder], 4 * scales[folder]] for folder in ("three", "two", "one", "two")]
    kept = [[folder, 4 * scale] for folder, scale in scales.items()]
    assert told == [*trained, *kept, ["the script", 5, 400.0], ["the script", 5, None]]

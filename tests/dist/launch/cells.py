"""The cells of a notebook that `test_notebook.py` executes, and of a script that it feeds to an interpreter."""

DEFINED = """
import dataclasses, os, pathlib, signal, threading, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import paceline
points = torch.randn(112, 4, generator=torch.Generator().manual_seed(0))


class Lines(paceline.Task):
    batch_size = 32
    shards = 4

    def __init__(self, lr: float = 0.1):
        self.lr = lr

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def train_data(self):
        return TensorDataset(points, points.sum(1, keepdim=True))

    def eval_data(self):
        return TensorDataset(points[:50], points[:50].sum(1, keepdim=True))

    def loss(self, model, batch):
        x, y = batch
        return paceline.Loss.mean((model(x) - y).square().flatten())


@dataclasses.dataclass
class Seen:
    rank: int
    total: float


def work(run, offset):
    return Seen(run.world.rank, offset + len(points))
"""
ONE = """
one = paceline.train(Lines, settings={"lr": 0.05}, workers=1, epochs=2, threads=1)
"""
KILLED = """
def first():
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Killed(Lines):
    def loss(self, model, batch):
        if self.steps_done == 3 and first():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


flag = pathlib.Path("killed").resolve()
two = paceline.train(Killed(lr=0.05), workers=2, epochs=2, threads=1)
assert two.weights_sha256 == one.weights_sha256, (one, two)
assert (two.restarts, flag.exists()) == (1, True), two.restarts
assert torch.equal(two.model()[0].weight, one.model()[0].weight)
two
"""
LAUNCHED = """
seen = paceline.launch(work, 5, workers=2, threads=1)
assert isinstance(seen[1], Seen)
print(seen)
"""
FAILS = """
class Broken(Lines):
    def loss(self, model, batch):
        return wrong_name

paceline.train(Broken, workers=2, threads=1, out="broken")
"""
STOPPED = """
class Slow(Lines):
    def loss(self, model, batch):
        time.sleep(0.02)
        return super().loss(model, batch)

def press():
    events = pathlib.Path("stopped/events.jsonl")
    while not events.exists() or '"kind":"step"' not in events.read_text():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

presses = threading.Thread(target=press)
presses.start()
paceline.train(Slow, settings={"lr": 0.05}, workers=2, epochs=1000, threads=1, out="stopped")
"""
RESUMED = """
presses.join()
from paceline.launch.workers import fork_server
server = fork_server.shared()._process.pid
workers = pathlib.Path(f"/proc/{server}/task/{server}/children").read_text().split()
assert not workers, workers
again = paceline.resume("stopped", task=Lines, epochs=2, workers=1, progress=False)
assert again.weights_sha256 == one.weights_sha256
try:
    paceline.resume("stopped", epochs=3)
except paceline.InputError as error:
    print(error)
"""

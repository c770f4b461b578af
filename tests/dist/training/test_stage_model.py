"""A loop of one's own under pp: its model tells one process's values or refuses in one line, and its exceptions are its own."""

import copy
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss
from paceline.errors import InputError, WorkerFailedError

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X[:, :3].argmax(1))


class Net(nn.Module):
    """Layers in a list, with a forward pass of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        """Return the scores."""
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(F.dropout(self.norm(x), 0.1, self.training))


def rows():
    """Return layers in a row."""
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 3))


KINDS = {"net": Net, "rows": rows}


def loss(model, batch):
    """Return the loss of one batch."""
    return Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def prepared(run, kind):
    """Return model and optimizer, with a hook that the loop puts on a layer."""
    model, optimizer = run.prepare(KINDS[kind], lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    next(one for one in model.modules() if isinstance(one, nn.Linear)).register_forward_hook(
        lambda _, __, made: 1.5 * made
    )
    return model, optimizer


# What the loop does with its model.

USES = {
    "copy": lambda model, kept: copy.deepcopy(model),
    "copy of the state": lambda model, kept: copy.deepcopy(model.state_dict()),
    "norm": lambda model, kept: sum(one.norm().item() for one in model.parameters()),
    "norm of what was kept": lambda model, kept: sum(one.norm().item() for one in kept),
    "call": lambda model, kept: model(X),
}


def use(run, kind):
    """Use the model between steps; return what came of it, each layer's own values and the weights at the end."""
    model, _ = prepared(run, kind)
    kept, first = list(model.parameters()), copy.deepcopy(model.state_dict())
    seen = {}
    for step in run.steps(DATA, batch_size=8, steps=4):
        step.compute(loss)
        if step.number == 1:
            for name, one in USES.items():
                try:
                    one(model, kept)
                    seen[name] = "done"
                except InputError as error:
                    seen[name] = str(error)
            if run.world.mesh.size("fsdp") == 1:
                model.load_state_dict(first)
                for one in model.parameters():
                    one.data.clamp_(-0.3, 0.3)
    layers = {}
    for name, one in model.named_parameters():
        try:
            layers[name] = one.tolist()
        except InputError:
            layers[name] = None
    sizes = sum(one.numel() for one in model.parameters()), list(model.state_dict(keep_vars=True))
    return seen, layers, sizes, run.weights_sha256()


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_has_one_process_s_values_or_says_that_it_has_them_not(kind):
    ((seen, whole, sizes, weights),) = paceline.launch(use, kind, workers=1, shards=4, threads=1)
    assert set(seen.values()) == {"done"}
    found = paceline.launch(use, kind, workers=2, shards=4, strategy="pp", threads=1)
    assert [one[3] for one in found] == [weights] * 2
    for seen, layers, counted, _ in found:
        assert all("not on this worker" in words for words in seen.values()), seen
        assert counted == sizes
        assert all(values in (None, whole[name]) for name, values in layers.items())
    parts = [{name for name, values in one[1].items() if values} for one in found]
    assert parts[0] | parts[1] == set(whole)
    assert parts[0]
    assert parts[1]
    assert not parts[0] & parts[1]


def test_rows_of_a_stage_are_no_answer_either():
    found = paceline.launch(use, "net", workers=4, shards=4, strategy="fsdp=2,pp=2", threads=1)
    for seen, layers, _, _ in found:
        assert all("not on this worker" in words for words in seen.values()), seen
        assert set(layers.values()) == {None}


# What the loop raises.


def fail(run, kind, folder, times):
    """Raise on one rank behind a step, so often."""
    prepared(run, kind)
    for step in run.steps(DATA, batch_size=8, steps=4):
        step.compute(loss)
        marks = len(list(Path(folder).iterdir()))
        if step.number == 1 and run.world.rank == 1 and marks < times:
            Path(folder, str(marks)).touch()
            raise KeyError("of the loop")
    return run.weights_sha256(), len(run._engine.state.recoveries)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_the_loop_is_tried_once_more_and_then_its_own(kind, tmp_path):
    ((weights, _),) = paceline.launch(fail, kind, str(tmp_path), 0, workers=1, shards=4, threads=1)
    once, twice = tmp_path / "once", tmp_path / "twice"
    once.mkdir()
    twice.mkdir()
    options = {"workers": 2, "shards": 4, "strategy": "pp", "threads": 1}
    assert paceline.launch(fail, kind, str(once), 1, **options) == ((weights, 1),) * 2
    with pytest.raises(WorkerFailedError, match="rank 1") as caught:
        paceline.launch(fail, kind, str(twice), 2, **options)
    assert "KeyError: 'of the loop'" in "".join(caught.value.__notes__)


def lose(run, folder):
    """Lose a worker of a pipeline whose model was handed over ready made."""
    model = rows()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(DATA, batch_size=8, steps=4):
        step.compute(loss)
        if step.number == 1 and run.world.rank == 1 and not list(Path(folder).iterdir()):
            Path(folder, "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_model_that_was_handed_over_ready_made_does_not_survive_a_death(tmp_path):
    with pytest.raises(
        InputError, match="a model that was given as an object: this worker no longer has other stages"
    ):
        paceline.launch(lose, str(tmp_path), workers=2, shards=4, strategy="pp", threads=1, device="cpu")


def replace(run):
    """Put other parameters in the place of the model's, between two steps."""
    model, _ = prepared(run, "rows")
    for step in run.steps(DATA, batch_size=8, steps=3):
        step.compute(loss)
        if step.number == 1:
            model.load_state_dict(copy.deepcopy(rows().state_dict()), assign=True)


def test_a_parameter_in_the_place_of_another_is_refused():
    with pytest.raises(InputError, match=r"0\.weight was replaced"):
        paceline.launch(replace, strategy="pp", workers=2, shards=2, threads=1, device="cpu")

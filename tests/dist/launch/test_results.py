"""`paceline.launch`: what goes out to the workers and what comes back."""

import os
import threading
from pathlib import Path

import pytest
import torch

import paceline
from paceline.launch.workers import process_limit
from paceline.world import all_gather_object, env
from tests.dist.launch.processes import run_python


def describe(run, *args, **kwargs):
    return run.world.rank, run.world.size, args, kwargs


def where(run):
    return os.getcwd(), os.getppid(), torch.get_num_threads(), os.environ.get("PACELINE_TEST_WORD")  # noqa: PTH109


def tensor_of(run, base):
    return base + run.world.rank


class Owner:
    @staticmethod
    def method(run):
        return run.world.rank


def test_results_come_by_rank_and_arguments_travel():
    results = paceline.launch(describe, 5, "text", workers=3, kwargs={"workers": "mine"})
    assert results == tuple((rank, 3, (5, "text"), {"workers": "mine"}) for rank in range(3))


def test_tensors_travel_both_ways():
    first, second = paceline.launch(tensor_of, torch.arange(3), workers=2)
    assert torch.equal(first, torch.arange(3))
    assert torch.equal(second, torch.arange(3) + 1)


def told(run, given):
    """Return what came, what the others sent, and a metric of values of each type."""

    def values(_, batch):
        return {
            name: paceline.Collected(batch[0].to(one.dtype), compute=lambda every: float(every.numel()))
            for name, one in given.items()
            if one.dim()
        }

    run.prepare(torch.nn.Linear(1, 1), lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    counted = run.evaluate(torch.utils.data.TensorDataset(torch.ones(7)), values, batch_size=4)
    return given, all_gather_object(run.world.comm, given)[-1], counted


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_type_travel():
    kinds = (
        "bool uint8 uint16 uint32 uint64 int8 bfloat16 float8_e4m3fn float8_e5m2 complex32 complex128".split()
    )
    given = {kind: torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, kind)).t() for kind in kinds}
    given |= {"one": torch.tensor(2**63, dtype=torch.uint64), "none": torch.empty(0, 3, dtype=torch.uint16)}
    for came, sent, counted in paceline.launch(told, given, workers=2):
        for found in (came, sent):
            for kind, one in given.items():
                assert (found[kind].dtype, found[kind].shape) == (one.dtype, one.shape)
                assert found[kind].tolist() == one.tolist()
        assert counted == dict.fromkeys((name for name, one in given.items() if one.dim()), 7.0)


def test_a_method_of_a_class_is_found():
    assert paceline.launch(Owner.method, workers=2) == (0, 1)


def test_a_second_launch_uses_the_warm_fork_server_in_the_folder_and_environment_of_its_own(
    tmp_path, monkeypatch
):
    ((_, server, _, nothing),) = paceline.launch(where, workers=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_TEST_WORD", "here")
    again = paceline.launch(where, workers=2, threads=1)
    assert nothing is None
    assert again == ((str(tmp_path), server, 1, "here"),) * 2


def test_launching_from_another_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(paceline.launch(describe, workers=2)))
    thread.start()
    thread.join()
    assert [rank for rank, *_ in results[0]] == [0, 1]


def test_a_function_that_workers_cannot_import_is_refused():
    def local(run):
        return run

    for function in (lambda run: run, local):
        with pytest.raises(paceline.InputError, match="Define it at the top of its module"):
            paceline.launch(function, workers=2)


def test_arguments_that_cannot_travel_are_refused():
    with pytest.raises(paceline.InputError, match=r"argument 1 \(lock\) of describe cannot be sent"):
        paceline.launch(describe, threading.Lock(), workers=2)


SCRIPT = """
import sys
import paceline
from paceline.launch.workers import process_limit
from paceline.world import env

SEEN = sys.argv[1]

class Point:
    def __init__(self, x): self.x = x

def main(run, point):
    print("in rank", run.world.rank)
    return run.world.rank, SEEN, type(point).__name__, point.x

print(paceline.launch(main, Point(3), workers=2))
print(paceline.launch(main, Point(4), workers=1))
"""


def test_a_script_needs_no_main_guard(tmp_path):
    script = tmp_path / "no_guard.py"
    script.write_text(SCRIPT)
    ended = run_python(tmp_path, str(script), "word")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "in rank 0",
        "((0, 'word', 'Point', 3), (1, 'word', 'Point', 3))",
        "in rank 0",
        "((0, 'word', 'Point', 4),)",
    ]
    assert [path.name for path in Path(tmp_path).iterdir()] == ["no_guard.py"]


CLEARS = """
import shutil

import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.launch.workers import process_limit
from paceline.world import env

{guard}shutil.rmtree("run", ignore_errors=True)  # start afresh


def main(run):
    model = torch.nn.Linear(4, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(torch.ones(16, 4)), batch_size=8, steps=4):
        for (x,) in step:
            step.backward(model(x).flatten())
        step.apply()
    return run._engine.state.started_at


print(paceline.launch(main, out="run", threads=1, device="cpu", save_every=2, {options}))
"""


@pytest.mark.parametrize("options", ["strategy='single'", "workers=2"])
def test_a_script_that_clears_its_folder_in_every_worker_is_told(options, tmp_path):
    script = tmp_path / "clears.py"

    def ended(guard):
        script.write_text(CLEARS.format(guard=guard, options=options))
        return run_python(tmp_path, str(script))

    cleared = ended("")
    assert cleared.returncode == 1
    assert "run/spec.json has vanished" in cleared.stderr.splitlines()[-1]
    assert "paceline.errors.InputError" in cleared.stderr.splitlines()[-1]
    assert cleared.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["clears.py"]
    guarded = ended('if __name__ == "__main__":\n    ')
    assert (guarded.returncode, guarded.stdout.startswith("(0,")) == (0, True), guarded.stderr
    assert (tmp_path / "run" / "spec.json").exists()


def test_many_more_workers_than_cores_are_not_started_without_a_word(monkeypatch, capfd):
    paceline.launch(Owner.method, workers=2)
    assert "cores" not in capfd.readouterr().err
    monkeypatch.setattr(process_limit, "CROWDED", 1 / env.cores())
    assert list(paceline.launch(Owner.method, workers=2)) == [0, 1]
    assert f"note: 2 workers share the {env.cores()} cores of this machine" in capfd.readouterr().err

"""Split layers: the answer of one process up to rounding, whatever stands between them, and state that moves to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from paceline.errors import InputError
from paceline.state.chunks import TensorMeta, collect, split, survey
from paceline.strategies.tuning import Tuning
from paceline.training import trainer
from paceline.training.reference import load_task
from paceline.training.spec import TrainSpec
from paceline.training.strategy_inputs import carried_inputs, structure_of
from tests.contract.distance import bound, distance
from tests.contract.tasks import ADAM_EPSILON, LEARNING_RATE
from tests.dist.strategies.split_models import LENGTH, Reading

LIMIT = bound(8 * LENGTH, 20, gain=LEARNING_RATE / ADAM_EPSILON)
"""A global batch has 8 sentences: no sum over features is longer than the one over their words, which is split too."""
State = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One training, and a state of another strategy to be taken over."""

    task: str = "Reading"
    settings: dict[str, str] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=Tuning)
    shards: int = 2
    steps: int = 6
    given: State | None = None

    @property
    def reference(self) -> str:
        """Name the training of one process that this one must equal."""
        return f"{self.task} {self.shards} {self.steps} {self.settings}"


@dataclass(frozen=True)
class Done:
    """What came of a job."""

    state: State
    moved: State | None
    """The given state, taken over and given back."""
    metrics: dict[str, float]
    held: int
    """Bytes of state on this worker."""


SEQUENCE, LOSS = Tuning(sequence_parallel=True), Tuning(loss_parallel=True)
JOBS = {
    "proposed": Job(steps=20),
    "auxiliary": Job("EachItem", {"optimizer": "adagrad"}),
    "planned": Job("Planned"),
    "sequence": Job(tuning=SEQUENCE),
    "loss": Job(tuning=LOSS),
    "recomputed": Job("Wrapped", tuning=Tuning(activation_checkpointing="selective")),
    "one layer": Job("Bare"),
    "loss of each item": Job("EachItem", {"optimizer": "adagrad"}, LOSS),
    **{
        f"one {shared} under two names": Job("TwoNames", {"shared": shared})
        for shared in ("layer", "half of a pair", "block", "dropout", "bias")
    },
}
MESHES = {
    "ddp=2,tp=2": Job(tuning=replace(SEQUENCE, loss_parallel=True), shards=5),
    "fsdp=2,tp=2": Job("EachItem", tuning=SEQUENCE, shards=5),
}


def open_run(run: paceline.Run, job: Job) -> paceline.Run:
    return paceline.Run(run.world, replace(run._engine.state.options, shards=job.shards, tuning=job.tuning))


def train(run: paceline.Run, job: Job) -> paceline.Run:
    own = open_run(run, job)
    path = f"tests.dist.strategies.split_models:{job.task}"
    trainer.main(own, TrainSpec(task=path, name=job.task, steps=job.steps, settings=job.settings))
    return own


def work(run: paceline.Run, jobs: Mapping[str, Job]) -> dict[str, Done]:
    made = {}
    for name, job in jobs.items():
        own = train(run, job)
        task = load_task(f"tests.dist.strategies.split_models:{job.task}", job.settings)
        metrics = own.evaluate(task.eval_data(), task.metrics, batch_size=7)
        moved = None
        if job.given is not None:
            other = open_run(run, job)
            other._engine.preparation.prepare_replica(
                task.model, task.optimizer, structure=structure_of(task)
            )
            other._engine.state.replica.load(job.given)
            moved = other._engine.state.replica.state()
        made[name] = Done(
            own._engine.state.replica.state(), moved, metrics, own._engine.state.replica.local_state().bytes
        )
    return made


def refuse(run: paceline.Run, jobs: Mapping[str, Job]) -> dict[str, str]:
    said = {}
    for name, job in jobs.items():
        try:
            train(run, job)
        except InputError as error:
            said[name] = str(error)
    return said


def launch(function: Any, jobs: Mapping[str, Job] | Job, strategy: str, workers: int) -> list[Any]:
    return list(paceline.launch(function, jobs, workers=workers, strategy=strategy, shards=2, threads=1))


@pytest.fixture(scope="module")
def one() -> dict[str, Done]:
    """Give what one process makes of every task."""
    jobs = {job.reference: replace(job, tuning=Tuning()) for job in [*JOBS.values(), *MESHES.values()]}
    done: dict[str, Done] = launch(work, jobs, "single", 1)[0]
    return done


@pytest.fixture(scope="module")
def two(one: dict[str, Done]) -> list[dict[str, Done]]:
    """Give what two workers make of every job, each of which is given the state of one process too."""
    jobs = {name: replace(job, given=one[job.reference].state) for name, job in JOBS.items()}
    return launch(work, jobs, "tp", 2)


def tensors(state: State) -> dict[str, Tensor]:
    return {key: chunk.values for key, chunk in split(state).chunks.items()}


def assert_same_state(left: State, right: State) -> None:
    assert tensors(left).keys() == tensors(right).keys()
    assert all(torch.equal(value, tensors(right)[key]) for key, value in tensors(left).items())
    assert split(left).extra_state == split(right).extra_state


@pytest.mark.parametrize("name", JOBS)
def test_the_weights_of_one_process(name: str, one: dict[str, Done], two: list[dict[str, Done]]) -> None:
    wanted = one[JOBS[name].reference]
    for done in (worker[name] for worker in two):
        assert 0 < distance(wanted.state["model"], done.state["model"]) <= LIMIT, "rounding, and no more"
        assert done.metrics == wanted.metrics
    assert_same_state(two[0][name].state, two[1][name].state)


def test_each_worker_holds_less_than_the_whole(one: dict[str, Done], two: list[dict[str, Done]]) -> None:
    # Embedding, scores, norms and the biases of layers split by rows are whole: a third of this small model.
    for worker in two:
        assert worker["proposed"].held < 0.7 * one[JOBS["proposed"].reference].held


@pytest.mark.parametrize("name", JOBS)
def test_a_state_of_one_process_comes_back_to_the_bit(
    name: str, one: dict[str, Done], two: list[dict[str, Done]]
) -> None:
    for worker in two:
        moved = worker[name].moved
        assert moved is not None
        assert_same_state(one[JOBS[name].reference].state, moved)


def test_one_process_takes_over_a_split_state_to_the_bit(two: list[dict[str, Done]]) -> None:
    names = ("proposed", "auxiliary", "one layer under two names")
    jobs = {name: replace(JOBS[name], given=two[0][name].state) for name in names}
    moved = launch(work, jobs, "single", 1)[0]
    for name in names:
        assert_same_state(two[0][name].state, moved[name].moved)


@pytest.mark.parametrize("mesh", MESHES)
def test_data_parallel_beside_it(mesh: str, one: dict[str, Done]) -> None:
    job = MESHES[mesh]
    wanted = one[job.reference]
    workers = [done["job"] for done in launch(work, {"job": replace(job, given=wanted.state)}, mesh, 4)]
    for done in workers:
        assert 0 < distance(wanted.state["model"], done.state["model"]) <= LIMIT
        assert done.metrics == wanted.metrics
        assert_same_state(workers[0].state, done.state)
        assert_same_state(wanted.state, done.moved or {})
    if "fsdp" in mesh:
        assert max(done.held for done in workers) < 0.4 * wanted.held


def own_loop(run: paceline.Run) -> tuple[State, list[float | None]]:
    """Train with a model and an optimizer that were made before anybody knew of workers."""
    task = Reading(optimizer="adagrad")
    torch.manual_seed(3 + run.world.rank)  # the first worker's weights are everybody's
    made = task.model()
    model, optimizer = run.prepare(made, task.optimizer(made))
    norms = []
    for step in run.steps(task.train_data(), batch_size=8, steps=4):
        for batch in step:
            loss = task.loss(model, batch)
            step.backward(loss.total, loss.weight)
        norms.append(step.apply(max_grad_norm=0.5).gradient_norm)
    assert optimizer is run._engine.state.replica.optimizer
    return run._engine.state.replica.state(), norms


def test_a_loop_of_the_users_own() -> None:
    (wanted, norms), (got, other_norms), *_ = [
        *paceline.launch(own_loop, workers=1, strategy="single", shards=2, threads=1),
        *paceline.launch(own_loop, workers=2, strategy="tp", shards=2, threads=1),
    ]
    assert 0 < distance(wanted["model"], got["model"]) <= LIMIT
    assert other_norms == pytest.approx(norms, rel=1e-5)
    assert tensors(wanted).keys() == tensors(got).keys()


def regroup(run: paceline.Run, job: Job) -> tuple[State, State]:
    """Train, let go of the group, and hand the state over to a replica of the next one, as a recovery does."""
    own = train(run, job)
    before = own._engine.state.replica.state()
    own._engine.state.replica.abandon()
    held = own._engine.state.replica.local_state()
    again = own._engine.state.strategy.prepare(
        carried_inputs(own._engine.preparation.inputs, own._engine.state.replica), own.world
    )
    whole = dict(collect(own.world, held.chunks, survey(own.world, held.chunks)))
    metas = {key: TensorMeta(tuple(value.shape), value.dtype) for key, value in whole.items()}
    again.load_local_state(metas, lambda key, bounds: bounds.of(whole[key]), held.extra_state)
    return before, again.state()


def test_a_group_that_forms_anew_goes_on_with_the_same_state() -> None:
    for before, after in launch(regroup, Job(steps=3), "tp", 2):
        assert_same_state(before, after)


REFUSED = {
    "softmax": (Job("Between", {"between": "softmax"}), r"block makes something else split than whole, .* apart"),
    "dropout": (Job("Between", {"between": "dropout"}), r"or draws random numbers otherwise than by nn\.Dropout"),
    "planned softmax": (Job("Planned", {"between": "softmax"}), r"needs all features \(softmax, a norm\)"),
    "scale": (Job("Between", {"between": "scale"}), r"block\.scale gets another gradient on each worker"),
    "plan": (Job("Planned", {"layer": "block.no"}), r"unknown layer in tensor_plan\(\): 'block\.no'"),
    "tied": (Job("TwoNames", {"shared": "bias", "plan": "block.first.gate"}), r"gate\.bias is block\.second\.gate\.bias too"),
    "optimizer": (Job(settings={"optimizer": "adafactor"}), r"Adafactor"),
    "smoothing": (Job("Smoothed", tuning=LOSS), r"its gradient would be .* from the true one"),
    "mixing": (Job("Mixing", tuning=LOSS), r"--loss-parallel does not fit this loss \(.*DTensor"),
}  # fmt: skip


def test_what_would_be_another_answer_is_refused() -> None:
    for said in launch(refuse, {name: job for name, (job, _) in REFUSED.items()}, "tp", 2):
        for name, (_, message) in REFUSED.items():
            assert name in said, f"{name} was not refused"
            with pytest.raises(InputError, match=message):
                raise InputError(said[name])
            assert "\n" not in said[name]

"""`Run`: the surface on which a training loop is written, paceline's own included.

def main(run: paceline.Run):
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(dataset, batch_size=128, epochs=3):
        for batch in step:
            step.backward(loss_sum, weight)
        step.apply(clip=1.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline import strategies
from paceline.data import Feed, owned_shards
from paceline.errors import InputError
from paceline.observe import Event, Fanout, RunStarted, Sink
from paceline.strategies.base import Exactness, MetricsFunction, OpenReplica, Parts, ShardWork, StepWork
from paceline.strategies.buffers import Rule
from paceline.strategies.precision import Precision
from paceline.training import folder, resuming
from paceline.training.autocast import autocast_forward
from paceline.training.evaluation import evaluate
from paceline.training.journal import Journal, open_sinks
from paceline.training.options import RunOptions, SaveEvery
from paceline.training.position import Position
from paceline.training.receipt import Start
from paceline.training.recorder import describe_start, open_records
from paceline.training.step import Step
from paceline.world import Identity, World, connect, determinism, seeds

MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler | None]


class Run:
    """One worker's hold on a run: its world, its replica, its data, its checkpoints."""

    def __init__(self, world: World, options: RunOptions, sinks: Sequence[Sink] = ()) -> None:
        self.world = world
        self.options = options
        self.strategy = strategies.load(options.strategy)
        self.exactness = _promise(self.strategy.exactness, options)
        self.position = Position()
        self.started_at = 0
        """The step this process started from: above 0 in a resumed run."""
        self.name = "run"
        self._saved_at = -1
        self._sink = Fanout(sinks)
        self._replica: OpenReplica | None = None
        self._journal = Journal(self.emit, world.device)
        self._feeds: list[Feed] = []
        self._meta: dict[str, Any] = {}
        self._records = open_records(options, world)
        self.about: dict[str, Any] = {}
        """What the loop says of itself, for the receipt."""
        if self.exactness is Exactness.BITWISE:
            determinism.select_kernels(world.device, compiled=options.compile)
        seeds.seed_everything(seeds.derive(options.seed, "model"))

    @classmethod
    def join(cls, identity: Identity, options: RunOptions, events: int | None = None) -> Run:
        """Enter the world as `identity` and make the run; rank 0 sends events to the descriptor `events`."""
        folder.check(options)
        world = connect(
            identity, backend=options.backend, device=options.device, checked=options.check_collectives
        )
        return cls(world, options, open_sinks(options, world, events))

    # Preparing.

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | MakeOptimizer,
        scheduler: LRScheduler | MakeScheduler | None = None,
        buffers: Mapping[str, Rule] | None = None,
    ) -> tuple[nn.Module, Optimizer]:
        """Place the model, wire up its gradients, and take over the state of a run that is being resumed."""
        autocast = self.options.precision != "fp32"
        replica = self.prepare_replica(model, optimizer, scheduler, buffers)
        if autocast:
            autocast_forward(replica.model, Precision(self.options.precision, self.world.device))
        return replica.model, replica.optimizer

    def prepare_replica(
        self,
        model: nn.Module,
        optimizer: Optimizer | MakeOptimizer,
        scheduler: LRScheduler | MakeScheduler | None = None,
        buffers: Mapping[str, Rule] | None = None,
    ) -> OpenReplica:
        """Do the same for a loop that hands the strategy its loss function instead of calling backward."""
        if not isinstance(model, nn.Module):
            raise InputError(f"the model is a {type(model).__name__}, not a torch.nn.Module.")
        parts = Parts(
            model=model,
            make_optimizer=(lambda _: optimizer) if isinstance(optimizer, Optimizer) else optimizer,
            make_scheduler=scheduler if callable(scheduler) else (lambda _: scheduler),
            precision=Precision(self.options.precision, self.world.device),
            shards=self.options.total_shards,
            threads=self.options.workers if self.strategy.threaded else 1,
            exactness=self.exactness,
            buffer_rules=buffers or {},
            sync_batchnorm=self.options.sync_batchnorm,
            lane=self.options.lane,
            compile=self.options.compile,
            allow_unused=self.options.allow_unused,
        )
        self._replica = self.strategy.prepare(parts, self.world)
        if self.options.resume:
            self.position, self._meta = resuming.load(self._replica, self.options, self.emit)
            self.started_at = self.position.number
        return self._replica

    @property
    def replica(self) -> OpenReplica:
        """What `prepare` made."""
        if self._replica is None:
            raise InputError("run.steps was called before run.prepare(model, optimizer). Prepare first.")
        return self._replica

    # Data and steps.

    def feed(self, dataset: Any, *, batch_size: int, shuffle: bool = True, **loading: Any) -> Feed:
        """Open this worker's share of a data set."""
        options = self.options
        made = Feed(
            dataset,
            batch_size=batch_size,
            shards=options.total_shards,
            seed=options.seed,
            owned=owned_shards(self.world.rank, self.world.size, options.total_shards),
            shuffle=shuffle,
            micro_batch=options.micro_batch,
            pin_memory=self.world.device.type == "cuda",
            **{"loader_workers": options.loader_workers, **loading},
        )
        self._feeds.append(made)
        return made

    def steps(
        self,
        data: Any,
        *,
        batch_size: int = 32,
        epochs: int | None = None,
        steps: int | None = None,
        clip: float | None = None,
        after_epoch: Callable[[int], None] | None = None,
    ) -> Iterator[Step]:
        """Give one `Step` for each optimizer step, from where the run stands to its end."""
        feed = data if isinstance(data, Feed) else self.feed(data, batch_size=batch_size)
        self._check_batch_size(feed.batch_size)
        last = _last_step(feed, epochs, steps)
        replica = self.replica
        if self.started_at < self.position.number >= last:
            raise InputError(
                f"this run has taken its {self.position.number} steps: epochs and steps count from the beginning of the run. "
                "Call run.steps once, or give a larger number."
            )
        if (
            self.options.sync_batchnorm
            and feed.samples
            and 0 < feed.samples % feed.batch_size < self.world.size
        ):
            raise InputError(
                f"--sync-batchnorm needs a sample on each of {self.world.size} workers in every batch, but the last one has only "
                f"{feed.samples % feed.batch_size}. Use another --batch-size."
            )
        self._announce(feed, epochs, last)
        self._begin_records(feed, clip)
        due = SaveEvery.parse(self.options.save_every) if self.options.save_every else SaveEvery()
        while (epochs is None or self.position.epoch < epochs) and self.position.number < last:
            before = self.position
            for step in self._epoch(feed, replica, clip, last):
                yield step
                if step.result is None:
                    raise InputError(
                        f"step {step.number} was left without step.apply(), so its batch would be lost. Call apply once a step."
                    )
                if self.position.number < last and due.after_step(self.position.number):
                    self.save()
            if self.position.number == last and self.position.step != feed.steps_per_epoch:
                break
            if self.position == before and before.step == 0:
                raise InputError(
                    "the training stream gave no sample in a whole epoch. Give one with samples."
                )
            self.position = self.position.next_epoch()
            self._journal.end_epoch(self.position)
            if after_epoch is not None:
                after_epoch(self.position.epoch)
            if self.position.number < last and due.after_epoch(self.position.epoch):
                self.save()
        self._journal.settle()
        if self.options.out is not None and self._saved_at != self.position.number > self.started_at:
            self.save()
        self._records.finish()

    def _epoch(self, feed: Feed, replica: OpenReplica, clip: float | None, last: float) -> Iterator[Step]:
        seed = self.options.seed
        self._journal.start()
        for data in feed.epoch(self.position.epoch, self.position.step):
            number = self.position.number
            shards = [
                ShardWork(
                    shard.index,
                    seeds.derive(seed, "shard", number, shard.index),
                    shard.samples,
                    shard.batches,
                )
                for shard in data.shards
            ]
            work = StepWork(number, data.size, shards)
            yield Step(work, self.position.epoch, replica, self.world, clip, self._after)
            if self.position.number >= last:
                return

    def _check_batch_size(self, batch_size: int) -> None:
        there = self._meta.setdefault("batch_size", batch_size)
        if there != batch_size:
            raise InputError(
                f"this run has batches of {there} samples, not of {batch_size}: the answer would be another. "
                f"Use --batch-size {there}."
            )

    def _after(self, step: Step) -> None:
        """Stand behind a step that has just been applied."""
        self._records.step(step, self.position)
        self.position = self.position.after_step()
        self._journal.step(step, self.position, self.replica.optimizer)

    def _begin_records(self, feed: Feed, clip: float | None) -> None:
        def describe() -> Start:
            facts: dict[str, Any] = {"exactness": str(self.exactness), "clip": clip, "about": self.about}
            return describe_start(self.options, self.world, self.position, feed, **facts)

        self._records.begin(self.name, self.options.seed, feed.batch_size, describe)

    def _announce(self, feed: Feed, epochs: int | None, last: float) -> None:
        world, options = self.world, self.options
        self.emit(
            RunStarted(
                task=self.name,
                strategy=options.strategy,
                workers=options.workers,
                shards=options.total_shards,
                exactness=str(self.exactness),
                device=str(world.device),
                backend=world.backend,
                parameters=sum(parameter.numel() for parameter in self.replica.model.parameters()),
                samples=feed.samples,
                batch_size=feed.batch_size,
                total_steps=None if math.isinf(last) else int(last),
                epochs=epochs,
                start_step=self.position.number,
                out=str(options.out or ""),
            )
        )

    def evaluate(self, data: Any, metrics: MetricsFunction, *, batch_size: int = 32) -> dict[str, float]:
        """Measure a data set exactly; a metric is a sum and a weight, as in `Task.metrics`."""
        feed = data if isinstance(data, Feed) else self.feed(data, batch_size=batch_size, shuffle=False)
        return evaluate(feed, metrics, self.replica, self.world, self.options.seed)

    # Keeping and telling.

    def save(self) -> None:
        """Write a checkpoint of where the run stands; one worker writes it, when all have kept their part of the ledger."""
        self._journal.settle()
        meta = {"task": self.name, "batch_size": self._meta.get("batch_size")}
        self._records.before_save()
        state = resuming.save(self.replica, self.options, self.position, self.world, meta, self.emit)
        self._records.after_save(self.position.number, state["model"])
        self._saved_at = self.position.number

    def emit(self, event: Event) -> None:
        """Tell everyone who listens; only rank 0 has listeners."""
        self._sink.emit(event)

    @property
    def journal(self) -> Journal:
        """What the steps of this process came to."""
        return self._journal

    def close(self) -> None:
        """Let go of data, listeners and the world."""
        for feed in self._feeds:
            feed.close()
        self._records.close()
        self._sink.close()
        self.world.close()

    def with_options(self, **changes: Any) -> None:
        """Fill in options that only the task knows."""
        self.options = replace(self.options, **changes)


def _promise(level: Exactness, options: RunOptions) -> Exactness:
    """Give the level this run promises, or refuse to promise more than the strategy can give."""
    order = list(Exactness)
    if options.sync_batchnorm and level is Exactness.BITWISE:
        level = Exactness.NUMERIC  # sums over a whole batch depend on how it is spread
    if options.exact is None:
        return level
    asked = Exactness(options.exact)
    if order.index(asked) < order.index(level):
        raise InputError(
            f"--exact {asked} is more than --strategy {options.strategy} can give, which is {level}. "
            f"Use --exact {level}, or --strategy single."
        )
    return asked


def _last_step(feed: Feed, epochs: int | None, steps: int | None) -> float:
    """Give the number of the step at which the run ends, as far as it is known beforehand."""
    if steps is not None:
        return steps
    if epochs is None:
        raise InputError("the run has no end: give epochs or steps.")
    return math.inf if feed.steps_per_epoch is None else epochs * feed.steps_per_epoch

"""What the machine needs of a run, put together: one object for each job, and the record of where the run stands."""

from __future__ import annotations

from dataclasses import replace

from paceline import strategies
from paceline.observe import Note
from paceline.records import ledger
from paceline.recovery.membership import FixedMembership, Membership
from paceline.recovery.options import RecoveryOptions
from paceline.recovery.recovery import Recovery
from paceline.recovery.sharded_recovery import ShardedRecovery
from paceline.strategies.base import Exactness
from paceline.task import Task
from paceline.training.calls import Calls
from paceline.training.checks.before_first_step import promise
from paceline.training.core import EngineCore
from paceline.training.group import RunGroup
from paceline.training.journal import Journal
from paceline.training.listeners import Listeners
from paceline.training.loaders import OpenLoaders
from paceline.training.measuring import Measuring
from paceline.training.options import RunOptions
from paceline.training.predicting import Predicting
from paceline.training.preparation import Preparation
from paceline.training.profile import open_profile
from paceline.training.recorder import open_records
from paceline.training.reporting import Reporting
from paceline.training.saving import Saving
from paceline.training.spec import OVERRIDES, TrainSpec
from paceline.training.state import RunState
from paceline.training.user_loop.call_history import CallHistory
from paceline.training.user_loop.loop import Loop
from paceline.training.user_loop.replay import LoopReplay
from paceline.world import World, determinism, seeds
from paceline.world.status_page import Phase


class Engine(EngineCore):
    """One worker's part in a run: its world, its replica, its data, its checkpoints."""

    def __init__(
        self, world: World, options: RunOptions, membership: Membership | None, listeners: Listeners | None
    ) -> None:
        world.status_page.timeout_s = options.hang_timeout
        recovery_options = _recovery_options(options)
        strategy = strategies.load(options.choice.name)
        state = RunState(
            world=recovery_options.laid_out(world),
            strategy=strategy,
            emit=(lambda _: None) if listeners is None else listeners.emit,
            workers=0,
            options=options,
            exactness=promise(strategy, options),
        )
        state.workers = state.present_workers
        sharded = ShardedRecovery(recovery_options)
        super().__init__(
            state=state,
            loop=Loop(state),
            history=CallHistory(),
            loaders=OpenLoaders(state),
            journal=Journal(state.emit, world.device),
            records=open_records(options, state.world, lambda text: state.emit(Note(text=text))),
            sharded=sharded,
            recovery=Recovery(state, membership or FixedMembership(), sharded, recovery_options),
            profile=open_profile(options, state.world, state.emit),
        )
        if options.out is not None and state.waits_to_join:
            ledger.check_room(options.out)
        self.replay = LoopReplay(state=state, history=self.history)
        self.preparation = preparation = Preparation(core=self)
        self.saving = saving = Saving(core=self, preparation=preparation)
        self.recovery.hooks = group = RunGroup(
            core=self, listeners=listeners, preparation=preparation, saving=saving
        )
        self.measuring = Measuring(core=self, group=group)
        self.reporting = Reporting(core=self, replay=self.replay)
        self.predicting = Predicting(core=self, group=group)
        self.calls = Calls(core=self, replay=self.replay, preparation=preparation, saving=saving, group=group)
        self._listeners = listeners
        if listeners is not None:
            saving.first = listeners.flush
        if state.exactness is Exactness.BITWISE:
            determinism.select_kernels(world.device, compiled=options.compile)
        seeds.seed_everything(seeds.derive(options.seed, "model"))

    def begin_task(self, task: Task, spec: TrainSpec) -> None:
        """Train a task: its options, where the command line does not say otherwise, and the name of the run."""
        chosen = {name: spec.overrides.get(name, getattr(task, name)) for name in OVERRIDES}
        self.state.options = replace(self.state.options, **chosen)
        self.state.name, self.state.task = spec.name, task
        if task.keep_best is not None and self.saving.saver is not None:
            checkpoints = self.saving.saver.checkpoints
            checkpoints.keep_best = max(task.keep_best.k, checkpoints.keep_best)

    def close(self) -> None:
        """Release data, listeners and the world."""
        self.state.world.status_page.enter(Phase.ENDED)
        self.profile.close()
        self.loaders.close_all()
        self.saving.close()
        self.records.close()
        if self._listeners is not None:
            self._listeners.close()
        self.state.world.close()


def _recovery_options(options: RunOptions) -> RecoveryOptions:
    return RecoveryOptions(
        choice=options.choice,
        backend=options.backend,
        check_collectives=options.check_collectives,
        staleness=options.tuning.staleness,
        shard_optimizer=options.tuning.shard_optimizer,
        snapshot_every=options.snapshot_every if options.peer_snapshots else None,
        out=options.out,
    )

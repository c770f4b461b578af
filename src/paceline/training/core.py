"""What every part of a run's engine works on."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.recovery.recovery import Recovery
from paceline.recovery.sharded_recovery import ShardedRecovery
from paceline.training.changed_attributes import ChangedAttributes
from paceline.training.journal import Journal
from paceline.training.loaders import OpenLoaders
from paceline.training.profile import NoProfile
from paceline.training.recorder import NoRecords
from paceline.training.state import RunState
from paceline.training.user_loop.call_history import CallHistory
from paceline.training.user_loop.loop import Loop


@dataclass(kw_only=True)
class EngineCore:
    """What the parts of the engine of one run on one worker have in common."""

    state: RunState
    loop: Loop
    history: CallHistory
    loaders: OpenLoaders
    journal: Journal
    records: NoRecords
    sharded: ShardedRecovery
    recovery: Recovery
    profile: NoProfile
    changed: ChangedAttributes = field(default_factory=ChangedAttributes, init=False)
    """What the run has changed of its modules and its task beside tensors."""

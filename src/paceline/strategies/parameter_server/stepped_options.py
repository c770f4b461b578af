"""Options that an optimizer's own step changes: a count of steps in its group, a rate that it estimates.

Everything else in a group is the trainers' to say, whose loops and schedules set it. These are the servers': they tell the
trainers, who send them back only where their loop has changed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.state.optimizer_state import Options, same_option, same_options, saved_options_of, set_options


class SteppedOptions:
    """A server's side: which options its optimizer's step has changed so far, by group."""

    def __init__(self, optimizer: Optimizer, keys: list[set[str]]) -> None:
        self._optimizer = optimizer
        self.keys = keys
        self.behind_step: Options = []
        """What they were after the last step: the schedule, which may change them too, goes on on trainers by itself."""
        self.noted: Options = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch a step."""
        before = saved_options_of(self._optimizer)
        yield
        after = saved_options_of(self._optimizer)
        if not same_options(before, after):
            self.keys += [set() for _ in after[len(self.keys) :]]
            for keys, old, new in zip(self.keys, before, after, strict=False):
                keys |= {key for key in new if key not in old or not same_option(old[key], new[key])}
        self.begin()

    def begin(self) -> None:
        """Begin with what they are now, in a new group or after loading."""
        self.note()
        self.behind_step = self.noted

    def note(self) -> None:
        """Note what they are now: whatever a server's own loop does to them later, the trainers' counts."""
        options = saved_options_of(self._optimizer)
        self.noted = [
            {key: value for key, value in group.items() if key in keys}
            for keys, group in zip(self.keys, options, strict=False)
        ]

    def set(self, told: Options) -> None:
        """Set the options to what the trainers told, and what they did not to what was noted."""
        set_options(self._optimizer, self.noted)
        set_options(self._optimizer, told)


class HeardOptions:
    """A trainer's side: what the servers last told."""

    def __init__(self) -> None:
        self._heard: Options = []

    def hear(self, optimizer: Optimizer, told: list[Options], *, together: bool) -> None:
        """Load what each server told; those that do not step `together` count by themselves, and the first one's holds."""
        if together and not all(same_options(told[0], one) for one in told[1:]):
            raise InputError(
                f"{type(optimizer).__name__} computes an option of its group from the parameters that it has, and each server "
                "has others, so that they part. Use --servers 1, or --strategy ddp."
            )
        self._heard = told[0]
        set_options(optimizer, self._heard)

    def changed(self, options: Options) -> Options:
        """Return without what the servers know already."""
        heard = [*self._heard, *({} for _ in options[len(self._heard) :])]
        return [
            {
                key: value
                for key, value in group.items()
                if key not in known or not same_option(value, known[key])
            }
            for group, known in zip(options, heard, strict=False)
        ]

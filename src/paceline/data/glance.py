"""A few samples of a map-style data set, in a form that workers can compare: each reads only its own, so none sees another's.

What a data set gives in another form at each reading, from a generator of its own, says nothing of what it holds; so a
difference counts where the sample, read several times on one worker, stays the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch.utils.data import TensorDataset

from paceline.data.contents import Difference, places_of
from paceline.data.epochs import epoch_setters, tell_epoch
from paceline.data.generators import GeneratorsAside
from paceline.data.samples import Samples

SAMPLES = 4
"""How many are looked at: the first, the last and two between them."""
AGAIN, AT_MOST, SECONDS = 8, 512, 1.0
"""How often those that differ are read once more: at least, at most, and for how long. What is drawn rarely is seen by that."""

LARGE = 1e6
"""A number from here on is no label, but one that counts nanoseconds, or names something."""


class Glance:
    """Looks at a few samples of a data set."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._samples = dataset, Samples(dataset, seed)
        self._draws = type(dataset) is not TensorDataset
        """Whether its samples may be drawn, or be fetched in a way of its own."""

    def contents(self, epoch: int, samples: int) -> str:
        """Return what the data set of so many samples gives for a few of them, drawing what they draw when they are trained."""
        if setters := epoch_setters(self._dataset):
            tell_epoch(setters, epoch)
        chosen = sorted({(samples - 1) * one // (SAMPLES - 1) for one in range(SAMPLES)})
        with GeneratorsAside() if self._draws else nullcontext():
            return json.dumps({str(one): self._places(epoch, one) for one in chosen})

    def _places(self, epoch: int, sample: int) -> dict[str, tuple[str, int, str]]:
        try:
            if self._draws:
                self._samples.seed(epoch, sample)
            return places_of(self._samples.one(sample) if self._draws else self._dataset[sample])
        except Exception:  # noqa: BLE001 - an order may leave this sample out; else it is read, and named, in its turn
            return {}


def parted(mine: str, theirs: str, again: list[str]) -> tuple[int, Difference] | None:
    """Return the first sample that two workers have read differently, and its largest place in which they did.

    Left alone is what this worker itself has read differently `again`, and what is the same in all samples of a worker and
    differs between the two, where it is smaller than what they have in common: the name of a machine, the number of a process.
    So is text, or a large number, that no sample of the other has: it counts where it is at least half of what changes from
    sample to sample, as in a stream.
    """
    here, there = json.loads(mine), json.loads(theirs)
    readings = [json.loads(one) for one in again]
    steady = {
        place
        for found in here.values()
        for place in found
        if all(_hash(one, name, place) == _hash(here, name, place) for one in readings for name in here)
    }
    differing: dict[str, dict[str, int]] = {}
    common = changing = 0
    for sample in here:
        # One that could not be read, or looked into, on one of them tells nothing.
        for place in steady & here[sample].keys() if there.get(sample) else ():
            size = here[sample][place][1]
            if _hash(here, sample, place) == _hash(there, sample, place):
                common += size
                changing += size * _varies(here, place)
            else:
                differing.setdefault(sample, {})[place] = size
    places = {place for found in differing.values() for place in found}
    idle = {place for place in places if not (_varies(here, place) or _varies(there, place))}
    if _size_of(idle, differing) < common:
        places -= idle
    own = {place for place in places if _is_own(here, there, place)}
    if _size_of(own, differing) < changing:
        places -= own
    for sample, found in differing.items():
        counted = [place for place in found if place in places]
        if counted:
            place = max(counted, key=found.__getitem__)
            other = there[sample].get(place)
            return int(sample), Difference(
                place, here[sample][place][2], "nothing" if other is None else other[2]
            )
    return None


def parted_for_good(
    mine: str, theirs: str, readings: Iterable[str]
) -> tuple[tuple[int, Difference] | None, list[str]]:
    """Return what is left of that after some more `readings` by this worker, and those that were unlike its first."""
    difference, others, began = parted(mine, theirs, []), list[str](), time.monotonic()
    for number, one in enumerate(islice(readings, AT_MOST), 1):
        if one != mine and one not in others:
            others.append(one)
            difference = parted(mine, theirs, others)
        if difference is None or (number >= AGAIN and time.monotonic() - began > SECONDS):
            break
    return difference, others


def redrawn(mine: str, others: list[str]) -> tuple[int, Difference] | None:
    """Return the first tensor or array that a worker itself has read differently, and how it began then and before.

    A single number or a text may be a clock's, or a count of readings.
    """
    here = json.loads(mine)
    for one in map(json.loads, others):
        for sample, places in here.items():
            for place, (_, _, shown) in places.items():
                if shown.startswith("[") and _hash(one, sample, place) not in (None, places[place][0]):
                    return int(sample), Difference(place, shown, one[sample][place][2])
    return None


def _size_of(places: set[str], differing: dict[str, dict[str, int]]) -> int:
    return sum(size for found in differing.values() for place, size in found.items() if place in places)


def _is_own(here: dict[str, Any], there: dict[str, Any], place: str) -> bool:
    """Return whether a place may hold a worker's own words: text or large numbers, of which the other has none.

    Labels that two workers number otherwise are small, or among those of both.
    """
    said = [found[place][2] for found in (*here.values(), *there.values()) if place in found]
    mine, theirs = ({_hash(one, sample, place) for sample in one} for one in (here, there))
    return mine.isdisjoint(theirs) and all(map(_is_text_or_large, said))


def _is_text_or_large(shown: str) -> bool:
    if shown.lstrip("b")[:1] in ("'", '"'):
        return True
    try:
        return abs(float(shown.partition("(")[2].rstrip(")") or shown)) >= LARGE  # numpy names the type
    except ValueError:
        return False


def _hash(contents: dict[str, Any], sample: str, place: str) -> str | None:
    found = contents.get(sample, {}).get(place)
    return None if found is None else found[0]


def _varies(contents: dict[str, Any], place: str) -> bool:
    return len({_hash(contents, sample, place) for sample in contents}) > 1

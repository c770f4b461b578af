"""Reading samples of a map-style data set, so that what they draw depends on nothing but the sample.

Whatever `__getitem__` draws from torch, numpy or `random` is a function of (seed, epoch, sample), in an order of the run's
own of (seed, epoch, position); what the
collate function draws, of (seed, epoch, first sample of the micro-batch). Neither depends on the worker or
the loading process, and the training process's own generators are left as they were. (A generator that the
data set made for itself is its own affair.)

A data set that draws nothing pays only for the proof of it, once a step: samples are read plainly, and only
where a generator moved they are read again with a seed for each sample, as all later ones are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from paceline.data.copying import copied
from paceline.data.epochs import epoch_setters, tell_epoch
from paceline.data.generators import GeneratorsAside, seed_generators
from paceline.data.in_place import Items
from paceline.data.permutation import Indices
from paceline.data.resident import ResidentReader, fits_on
from paceline.data.samples import Samples
from paceline.world.seeds import derive

Collate = Callable[[list[Any]], Any]


class Reader(Protocol):
    """Turns the sample ids of some micro-batches into collated batches."""

    def read(self, epoch: int, pieces: Sequence[Indices]) -> list[Any]:
        """Return one collated batch for each piece; a piece with two columns holds positions of the epoch beside the samples."""
        ...


def reader_of(
    dataset: Any, *, seed: int, collate: Collate | None, device: torch.device | None = None
) -> Reader:
    """Choose the fastest reader that gives the same batches; `device` is where they go, and may be made."""
    plain_tensors = type(dataset) is TensorDataset and all(
        type(tensor) is Tensor and tensor.layout == torch.strided for tensor in dataset.tensors
    )
    if plain_tensors and collate is None:
        resident = device is not None and fits_on(device, dataset.tensors)
        return ResidentReader(dataset, device) if resident and device is not None else TensorReader(dataset)
    return SampleReader(dataset, seed=seed, collate=collate or default_collate)


class TensorReader:
    """Reads a `TensorDataset` with one operation per tensor; bit by bit what collating its items gives."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def read(self, epoch: int, pieces: Sequence[Indices]) -> list[Any]:  # noqa: ARG002
        """Return one batch for each piece: a list of tensors, as default_collate makes of tuples."""
        # Asked for each time: the data set may have been given others.
        tensors = self._dataset.tensors
        rows = [torch.from_numpy(piece) for piece in pieces]
        return [[tensor.index_select(0, chosen.to(tensor.device)) for tensor in tensors] for chosen in rows]


class SampleReader:
    """Reads any map-style data set sample by sample, or a micro-batch at once where it has `__getitems__`."""

    def __init__(self, dataset: Any, *, seed: int, collate: Collate) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate
        self._samples = Samples(dataset, seed)
        self._aside = GeneratorsAside()
        self._draws = False
        self._is_users = collate is not default_collate
        self._looks = self._is_users
        """Whether collate is watched for changes in place: in the first step that is read."""
        self._setters = epoch_setters(dataset)

    def read(self, epoch: int, pieces: Sequence[Indices]) -> list[Any]:
        """Return one collated batch for each piece."""
        if self._setters:
            tell_epoch(self._setters, epoch)
        batches = self._read(epoch, pieces)
        self._looks = False
        return batches

    def _read(self, epoch: int, pieces: Sequence[Indices]) -> list[Any]:
        with self._aside:
            if not self._draws:
                try:
                    batches = [self._plain(epoch, _samples(piece)) for piece in pieces]
                except Exception:
                    # What failed on draws that belong to nobody must be tried again with the sample's own.
                    if not self._aside.drawn():
                        raise
                else:
                    if not self._aside.drawn():
                        return batches
                self._draws = True
            return [self._seeded(epoch, piece) for piece in pieces]

    def _plain(self, epoch: int, samples: list[int]) -> Any:
        items = (
            self._many(epoch, samples)
            if self._samples.come_together
            else [self._one(epoch, i) for i in samples]
        )
        return self._collated(epoch, samples, items)

    def _seeded(self, epoch: int, piece: Indices) -> Any:
        items, samples = [], _samples(piece)
        # An order of the run's own may name a sample twice, which is not to be augmented alike.
        name, places = ("sample", samples) if piece.ndim == 1 else ("position", piece[:, 1].tolist())
        for sample, place in zip(samples, places, strict=True):
            self._samples.seed(epoch, place, name)
            items.append(self._one(epoch, sample))
        seed_generators(derive(self._seed, "collate", epoch, places[0]))
        return self._collated(epoch, samples, items)

    def _many(self, epoch: int, samples: list[int]) -> list[Any]:
        try:
            items: list[Any] = self._dataset.__getitems__(samples)
        except Exception as error:
            for sample in samples:  # one by one, so that the error names the sample
                self._one(epoch, sample)
            error.add_note(
                f"while reading samples {samples} at once, in epoch {epoch}; alone each can be read"
            )
            raise
        return items

    def _one(self, epoch: int, sample: int) -> Any:
        try:
            return self._samples.one(sample)
        except Exception as error:
            error.add_note(f"while reading sample {sample} of the data set, in epoch {epoch}")
            raise

    def _collated(self, epoch: int, samples: list[int], items: list[Any]) -> Any:
        watched = Items(items) if self._looks else None
        try:
            batch = self._collate(items)
        except Exception as error:
            error.add_note(f"while collating samples {samples}, in epoch {epoch}")
            raise
        if watched is not None:
            watched.check(samples, lambda sample: self._one(epoch, sample))
        # A function of the user's may fill the same memory for each batch, or hand on the data set's own: what lies in the
        # batches of a step would be the last one's, and work in place would change what is read later.
        return copied(batch) if self._is_users else batch


def _samples(piece: Indices) -> list[int]:
    samples: list[int] = (piece if piece.ndim == 1 else piece[:, 0]).tolist()
    return samples

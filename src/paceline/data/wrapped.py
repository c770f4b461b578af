"""Streams made of streams: shuffled by blocks, packed into sequences of one length, and read from text files.

Each has a state where the stream inside has one, so a resumed run goes on where it was.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data.stream_state import has_state
from paceline.errors import InputError
from paceline.ranges import COUNT


class Wrapped:
    """A stream around another one, which is told the epoch; it has a state where that has one."""

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, Iterator):
            raise InputError(
                f"a {type(dataset).__name__} can be read only once. Give an object whose __iter__ starts from the beginning."
            )
        self.dataset = dataset
        self._begins: dict[str, Any] | None = None
        self._state: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        # Asked for only where there is none: whoever has these two methods is believed to have a state.
        if name in ("state_dict", "load_state_dict") and has_state(self.__dict__.get("dataset")):
            return self._said if name == "state_dict" else self._load
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _said(self) -> dict[str, Any]:
        return dict(self._state)

    def _load(self, state: dict[str, Any]) -> None:
        self._begins = state

    def _begun(self) -> dict[str, Any] | None:
        """Return the state that this reading begins with; those after it begin at the beginning."""
        begins, self._begins = self._begins, None
        if begins is not None and begins["inside"] is not None:
            self.dataset.load_state_dict(begins["inside"])
        return begins

    def _inside(self) -> Any:
        return self.dataset.state_dict() if has_state(self.dataset) else None


class Shuffled(Wrapped):
    """A stream shuffled in blocks of `buffer` items, which are held: see `shuffled`."""

    def __init__(self, dataset: Any, buffer: int) -> None:
        super().__init__(dataset)
        self._buffer = COUNT.read("buffer", buffer)

    def __iter__(self) -> Iterator[Any]:
        begins = self._begun()
        # None for the beginning: before its first item a stream may still say where it was at the end of the last epoch.
        inside = None if begins is None else begins["inside"]
        items = iter(self.dataset)
        while True:
            held = list(islice(items, self._buffer))
            if not held:
                return
            key = random.getrandbits(63) if begins is None else begins["key"]
            first = 0 if begins is None else begins["given"]
            begins = None
            random.Random(key).shuffle(held)  # noqa: S311 - an order, no secret
            for given in range(first, len(held)):
                self._state = {"inside": inside, "key": key, "given": given + 1}
                yield held[given]
            inside = self._inside()


class Packed(Wrapped):
    """Sequences of one length from documents of any: see `packed`."""

    def __init__(self, documents: Any, length: int, eos: int | None) -> None:
        super().__init__(documents)
        self._length, self._eos = COUNT.read("length", length), eos

    def __iter__(self) -> Iterator[Tensor]:
        begins = self._begun()
        # As in `Shuffled`: None for the beginning.
        inside, taken = (None, 0) if begins is None else (begins["inside"], begins["taken"])
        held: deque[_Document] = deque()
        tokens = 0
        for document in self.dataset:
            read = torch.as_tensor(np.asarray(document), dtype=torch.int64).reshape(-1)
            if self._eos is not None:
                read = torch.cat([read, torch.tensor([self._eos])])
            held.append(_Document(read, inside, taken))
            tokens += len(read) - taken
            while tokens >= self._length:
                sequence = _next(held, self._length)
                tokens -= self._length
                self._state = {"inside": held[0].inside, "taken": held[0].taken}
                yield sequence
            inside, taken = self._inside(), 0


@dataclass
class _Document:
    """A document of which tokens are left."""

    tokens: Tensor
    inside: Any
    """The state of the stream before it: a document is read again where a run is resumed within it."""
    taken: int
    """How many of its tokens were given."""


def _next(held: deque[_Document], length: int) -> Tensor:
    """Take so many tokens from the documents that are held, in their order; one of them stays."""
    pieces = []
    while length:
        first = held[0]
        piece = first.tokens[first.taken : first.taken + length]
        first.taken += len(piece)
        length -= len(piece)
        pieces.append(piece)
        if length:
            held.popleft()
    return torch.cat(pieces)


class TextFiles:
    """Documents of text files, one a file or one a line, as lists of tokens: of bytes, or of what `tokenizer` returns."""

    def __init__(
        self,
        paths: Iterable[str | Path],
        tokenizer: Callable[[str], Any] | None = None,
        *,
        lines: bool = False,
    ) -> None:
        self.paths = [Path(path) for path in paths]
        if not self.paths:
            raise InputError("there are no text files: the list of paths is empty. Give at least one.")
        self._tokenizer, self._lines = tokenizer, lines
        self._place, self._begins = (0, 0), (0, 0)

    def state_dict(self) -> dict[str, int]:
        """Return how many files are done, and how many documents of the next."""
        return {"files": self._place[0], "documents": self._place[1]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration at a state; those after it begin at the beginning."""
        self._begins = (state["files"], state["documents"])

    def __iter__(self) -> Iterator[Any]:
        (first, done), self._begins = self._begins, (0, 0)
        self._place = (first, done)
        for number in range(first, len(self.paths)):
            for place, text in enumerate(self._documents(self.paths[number])):
                if number == first and place < done:
                    continue
                self._place = (number, place + 1)
                yield list(text.encode()) if self._tokenizer is None else self._tokenizer(text)

    def _documents(self, path: Path) -> Iterator[str]:
        with path.open(encoding="utf-8", newline="") as file:
            if not self._lines:
                yield file.read()
                return
            yield from (line for line in (line.rstrip("\r\n") for line in file) if line)


def shuffled(stream: Any, buffer: int = 1000) -> Shuffled:
    """Return a stream with the items of another, shuffled in blocks of `buffer`; the order is that of the run's seed."""
    return Shuffled(stream, buffer)


def packed(documents: Any, length: int, eos: int | None = None) -> Packed:
    """Return a stream of tensors of `length` tokens: the documents one after the other, each followed by `eos`, and cut.

    Documents are sequences of token numbers. What is left at the end of an epoch, fewer tokens than one length, is not used.
    """
    return Packed(documents, length, eos)

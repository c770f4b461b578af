"""The data that a worker has open: its shards of each data set, others after each change of the group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.data import Order, ShardedLoader, owned_shards
from paceline.data.loaders import drops_rest, is_loader, merged, note_batches
from paceline.errors import InputError
from paceline.observe import Note
from paceline.training.state import RunState

DEFAULT_BATCH = 32


class OpenLoaders:
    """One worker's loaders."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._open: list[ShardedLoader] = []
        self._doubted = False
        """Whether the user was told that a list may hold batches: once a run is enough."""
        self._counted_rest = False
        """Whether the user was told that drop_last leaves nothing out of an evaluation."""

    def open(
        self, data: Any, *, batch_size: int | None = None, every_sample: bool = False, **loading: Any
    ) -> ShardedLoader:
        """Open this worker's shards of a data set, or of a DataLoader's; `batch_size` is the GLOBAL one, 32 by default.

        `every_sample` is for what is measured: a DataLoader's `drop_last` is for training then.
        """
        options = self._state.options
        loading = {"num_workers": options.num_workers, **loading}
        if is_loader(data):
            if every_sample and drops_rest(data):
                self._note_rest(data)
            data, batch_size, loading = merged(data, batch_size, loading, every_sample=every_sample)
        if batch_size is None:
            batch_size = getattr(loading.get("order"), "batch_size", None)
        doubt = None if self._doubted else note_batches(data)
        if doubt is not None:
            self._doubted = True
            self._state.emit(Note(text=doubt))
        made = ShardedLoader(
            data,
            batch_size=DEFAULT_BATCH if batch_size is None else batch_size,
            shards=options.total_shards,
            seed=options.seed,
            owned=self._owned,
            micro_batch=options.micro_batch,
            pin_memory=self._state.world.device.type == "cuda",
            device=self._state.world.device,
            **loading,
        )
        self._open.append(made)
        return made

    def _note_rest(self, loader: Any) -> None:
        if not self._counted_rest:
            self._counted_rest = True
            text = "every sample is measured once, those too that drop_last=True of the {} would leave out"
            self._state.emit(Note(text=text.format(type(loader).__name__)))

    def opened(self, data: Any, *, batch_size: int | None, order: Order | None) -> ShardedLoader:
        """Return the loader of what a call of `run.steps` goes through, which may be one already."""
        if not isinstance(data, ShardedLoader):
            return self.open(data, batch_size=batch_size, order=order)
        if order is not None:
            raise InputError("the loader was opened with its order: say run.loader(data, order=...).")
        return data

    @contextmanager
    def measured(self, data: Any, batch_size: int | None) -> Iterator[ShardedLoader]:
        """Open what is measured, every sample once and in order, for the block; a loader stays as open as it is."""
        if isinstance(data, ShardedLoader):
            yield data
            return
        loader = self.open(data, batch_size=batch_size, shuffle=False, every_sample=True)
        try:
            yield loader
        finally:
            self.close(loader)

    @property
    def _owned(self) -> range:
        world = self._state.world
        return owned_shards(world.dp_rank, world.dp_size, self._state.options.total_shards, world.shares)

    def enter_group(self) -> None:
        """Read this worker's shards of the group that has formed."""
        for loader in self._open:
            loader.own(self._owned)

    def close(self, loader: ShardedLoader) -> None:
        """Close one."""
        self._open.remove(loader)
        loader.close()

    def close_all(self) -> None:
        """Close those that are open."""
        for loader in self._open:
            loader.close()

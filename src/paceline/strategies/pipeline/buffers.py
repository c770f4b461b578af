"""The buffers of one worker's stages through a step."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from paceline.strategies.buffers.buffers import Buffers
from paceline.strategies.pipeline.stage import Stage


class StageBuffers(Buffers):
    """Those of all stages here; each combines its own over the shards."""

    def __init__(self, model: nn.Module, stages: Mapping[int, Stage]) -> None:
        super().__init__(model, {}, shards=1)
        self._stages = stages

    def begin(self) -> None:
        """Note where every shard of this step starts from."""
        self.watched = True
        for stage in self._stages.values():
            stage.buffers.begin()

    def end_step(self) -> None:
        """Forget where the step started from."""
        for stage in self._stages.values():
            stage.buffers.end_step()

    def put_back(self) -> None:
        """Undo what an unfinished step did to them, and let go of its passes."""
        for stage in self._stages.values():
            stage.own_buffers()
            stage.forget()
            stage.buffers.put_back()

    def known(self) -> list[Tensor]:
        """Return all of them: a loop never holds them while a step is in flight."""
        return list(self.model.buffers())

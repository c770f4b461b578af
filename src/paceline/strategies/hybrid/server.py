"""A server of hybrid: holds some rows of every table with their optimizer state, and updates those that a step touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.reduce.tree import Gradients, TreeSum
from paceline.state.chunks import LocalState
from paceline.state.optimizer_state import set_options
from paceline.strategies import gradients, sparse
from paceline.strategies.base import Leaves, StrategyInputs
from paceline.strategies.guards.places import Places
from paceline.strategies.hybrid.embedding_service import EmbeddingService, Norms, Sent
from paceline.strategies.hybrid.kept import KeptPlacement, KeptState, bounds, check_slots, part_of
from paceline.strategies.hybrid.tables import send_away
from paceline.strategies.memory.offload import without_memory
from paceline.strategies.replica import Replica
from paceline.strategies.result import StepResult
from paceline.strategies.sharded import LocalPart
from paceline.strategies.step_state import StepState
from paceline.world import World
from paceline.world.fault_points import OPTIMIZER as OPTIMIZER_POINT
from paceline.world.fault_points import hit
from paceline.world.status_page import Phase


class TablesPlacement(KeptPlacement):
    """Rows of the tables, and the task's optimizer over them."""

    computes = False

    def __init__(self, inputs: StrategyInputs, world: World) -> None:
        self.model, self.world = inputs.model, world
        self.service: EmbeddingService
        self.parts: list[LocalPart] = []
        """This server's rows of each table."""
        self._remains: LocalState | None = None
        """What this server held when its group broke."""

    def adopt(self, optimizer: Optimizer) -> None:
        """Keep this server's rows, and open the service that trainers ask."""
        super().adopt(optimizer)
        place, servers = self.world.rank - self.world.mesh.trainers, self.world.mesh.servers
        cut = {}
        for name, table in sparse.tables(self.model).items():
            edges = bounds(table.num_embeddings, servers)
            cut[sparse.weight_of(name)] = part_of(
                table.weight, edges[place], edges[place + 1], self.world.device
            )
        self.kept, self.parts = KeptState(self.model, (), cut), list(cut.values())
        self.kept.wire(optimizer)
        self._empty_model()
        self.wired = Places(self.model)
        self.service = EmbeddingService(self.parts, self.world.mesh.trainers, self.world.interruption)
        self.service.serve(self.world)

    def _empty_model(self) -> None:
        """Release the tensors that this worker does not keep: its model only describes them."""
        for name, table in sparse.tables(self.model).items():
            send_away(name, table, _nowhere, self.world.device)
        for parameter in self.model.parameters():
            parameter.data = without_memory(parameter.shape, parameter.dtype, self.world.device)

    def leaves(self, step: StepState) -> Leaves:  # noqa: ARG002
        """Return none: no loss is computed here."""
        return Leaves(())

    def refresh(self) -> None:
        """Serve rows for a step."""
        self.service.advance()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Serve rows while the trainers measure."""
        self.refresh()
        yield

    def local_state(self) -> LocalState:
        """Return this server's rows."""
        return self._remains if self._remains is not None else super().local_state()

    def abandon(self) -> None:
        """Release the group, and trainers that wait here; what this server holds stays."""
        self.service.close()
        if self._remains is None:
            self._remains = self.local_state()
            self.kept.unwire(self.optimizer)
        self.service.abandon()


class TablesUpdate:
    """Adds up what the trainers bring along the tree, and updates the rows when they say so."""

    def __init__(self, placement: TablesPlacement) -> None:
        self._placement = placement

    def apply(self, replica: Replica, max_grad_norm: float | None) -> StepResult:  # noqa: ARG002  (the trainers clip)
        """Take part in a step of the trainers."""
        step, placement, world = replica.step_state, self._placement, replica.world
        before = world.status_page.enter(Phase.COMMUNICATION)
        summed = self._add_up(placement.service.collect(), step.shards)
        commit = placement.service.confirm(_norms(summed))
        world.status_page.enter(before)
        result = StepResult(step.work.number, step.work.size, commit.entry.to(world.device), {})
        if result.on_cpu:
            result.check()
        result.norm = commit.norm
        result.check_norm()  # on the CPU in any case: the trainers sent it
        replica.partial_update.check()
        hit(OPTIMIZER_POINT)
        for part, gradient in zip(placement.parts, summed, strict=False):
            part.values.grad = gradient
        gradients.scale([one.values() for one in summed if one is not None], commit.factor)
        set_options(replica.optimizer, commit.options)
        replica.optimizer.step()
        replica.step_schedule()
        check_slots(replica.optimizer, placement.parts)
        for part in placement.parts:
            part.values.grad = None
        placement.service.advance()
        return result

    def _add_up(self, brought: list[Sent], shards: int) -> Gradients:
        tree = TreeSum(shards, sparse.add)
        for node, held in (row for sent in brought for row in sent):
            placed: Gradients = [
                None
                if one is None
                else sparse.made_of(one[0], one[1], part.values.shape).to(self._placement.world.device)
                for one, part in zip(held, self._placement.parts, strict=True)
            ]
            tree.add(node, placed)
        return tree.nodes[0][1] if tree.nodes else []


def _norms(summed: Gradients) -> Norms:
    return [None if one is None else sparse.norms(one).cpu() for one in summed]


def _nowhere(numbers: Tensor) -> Tensor:
    raise InputError(f"the model was called on a server, for {len(numbers)} rows. Call it on trainers only.")

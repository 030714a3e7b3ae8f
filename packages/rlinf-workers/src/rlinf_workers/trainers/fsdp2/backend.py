"""FSDP2Backend: the ranks of a group shard one model, and each replica computes its own shards of a batch.

Weights, gradients and the optimizer's moments are sharded over the ranks; each layer is all-gathered before use and
freed after it. A layer's gradient is reduce-scattered once autograd has all of it; a padded micro-batch uses each layer
twice, so this waits for the second use (rlinf_sched.derive.memory). `backward` only stores the micro-batch and
`finish_backward` runs the passes: by then every rank has read all of its items, so no rank in a collective can wait for
one that waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from rlinf_algos import DeferredChecks
from rlinf_comm.weights import Layout
from rlinf_comm.weights.layouts import fsdp2_layout as fsdp2_layout, shard_boxes
from rlinf_workers.collectives import connect_alone
from rlinf_workers.models.compiled_layers import Compiles, compile_layers
from rlinf_workers.models.placement import HOST, HostPlaces, copy_alike, move_moments, place_steps, tensors_of
from rlinf_workers.models.sequence_parallel import shared_rows
from rlinf_workers.models.sharded_init import ShardedInit
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.models.weight_names import StoredWeights
from rlinf_workers.trainers.base import (
    LossOf,
    ModelAdapter,
    ModelOutputs,
    OptimizerSettings,
    TrainingBackend,
    defers_checks,
    sequence_ranks,
    shards_of,
)
from rlinf_workers.trainers.checkpoint import OPTIMIZER, num_steps_in, optimizer_tensors, parameter_of, writers
from rlinf_workers.trainers.fsdp2.aligned_passes import AlignedPasses, Pass
from rlinf_workers.trainers.fsdp2.sharding import (
    fill,
    gathered,
    give_memory,
    local,
    move,
    on_shard,
    recompute_feed_forward,
    shard,
    shard_place,
    skeleton,
    whole,
    whole_model,
)
from rlinf_workers.trainers.gradient_norm import gradient_norm
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend
from rlinf_workers.trainers.served import LowRank, Served, WeightChange
from rlinf_workers.trainers.statistics import Statistics, StatisticSums
from rlinf_workers.worker import Worker

T = TypeVar("T")


def fsdp2(
    model: ModelAdapter,
    worker: Worker,
    *,
    optimizer: OptimizerSettings | None,
    num_shards: int,
    compute_dtype: Literal["float32", "bfloat16"] = "float32",
    recompute: bool = False,
    sequence_parallel: int = 1,
    compile: Compiles = "auto",  # the option's name
) -> TrainingBackend:
    """A sharded model; a frozen one is whole on every rank, because its ranks are called at different times.

    Args:
        compute_dtype: "bfloat16" computes in bfloat16; weights, reductions and moments keep the model's dtype.
        recompute: the backward pass recomputes the feed-forward half of each layer.
        sequence_parallel: ranks of a replica, which compute each micro-batch together.
        compile: compile the decoder layers for packed rows.

    Raises: ValueError naming the key of the recipe.
    """
    lower = torch.bfloat16 if compute_dtype == "bfloat16" else None
    if optimizer is None:
        kind = _InDtype(model, lower) if lower else model
        return ReplicatedBackend(kind, worker, optimizer=None, num_shards=1, compile=compile)
    return FSDP2Backend(
        model,
        worker,
        optimizer=optimizer,
        num_shards=num_shards,
        lower=lower,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        compiles=compile,
    )


class _InDtype(ModelAdapter):
    """A frozen model whose parameters are stored in the dtype in which trained ones are computed."""

    def __init__(self, kind: ModelAdapter, dtype: torch.dtype) -> None:
        self._kind, self._dtype = kind, dtype
        self.load, self.describe = kind.load, kind.describe
        self.written_together, self.to_files = kind.written_together, kind.to_files

    def build(self, device: torch.device) -> nn.Module:
        model = self._kind.build(device)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self._dtype)
        return model

    def answers(self, model: Any, batch: Any, *, entropies: bool) -> ModelOutputs:
        return self._kind.answers(model, batch, entropies=entropies)


class FSDP2Backend:
    """A trained, sharded model; see trainers/base.py for the contract of the methods."""

    _optimizer: torch.optim.AdamW
    num_steps = 0

    def __init__(
        self,
        model: ModelAdapter,
        worker: Worker,
        *,
        optimizer: OptimizerSettings,
        num_shards: int,
        lower: torch.dtype | None,
        recompute: bool,
        sequence_parallel: int = 1,
        compiles: Compiles = "auto",
    ) -> None:
        if sequence_parallel == 1 < worker.identity.num_ranks_per_replica:
            raise ValueError(
                "plan.num_ranks_per_replica.actor: fsdp2 shards the model over all ranks of the actor and gives each "
                "its own micro-batches; leave the key out"
            )
        self._row_ranks = sequence_ranks(model, worker, sequence_parallel)
        replicas = worker.replicas
        self.shards: Sequence[int] = shards_of(num_shards, replicas.rank, replicas.num_ranks)
        self._kind, self._worker = model, worker
        self._aligned = AlignedPasses.of(worker)
        self._places = HostPlaces()
        self._number = self._aligned.register(self)
        with ShardedInit(worker.rank, worker.num_ranks) as shards:
            outline = model.outline()
        self._is_outline = outline is not None
        self._model = model.build(HOST) if outline is None else outline
        self._bare = skeleton(self._model)
        if recompute:
            recompute_feed_forward(self._model)
        compile_layers(self._model, compiles, worker.device, worker.note)
        if not dist.is_initialized():  # a single rank, but the mesh needs a process group
            connect_alone(worker.identity)
        mesh = init_device_mesh(worker.device.type, (worker.num_ranks,))
        first = {name: shards.take(p) for name, p in self._model.named_parameters() if p.is_meta}
        self._root = shard(self._model, mesh, lower)
        give_memory(self._model, first, worker.device)
        self._root.to(worker.device)  # moves buffers, and lets fully_shard see the new parameters
        if self._is_outline and (stored := self._kind.first_weights(self._model)) is not None:
            self._read(stored)
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._waiting: list[tuple[Pass, int, Any, LossOf, bool]] = []
        """Micro-batches whose passes `finish_backward` runs: pass, shard, batch, loss, whether with entropies."""
        self._statistics, self._checks = StatisticSums(), DeferredChecks()
        self.restart(optimizer)

    @property
    def kind(self) -> ModelAdapter:
        return self._kind

    def _read(self, stored: StoredWeights) -> None:
        buffers = stored.layout.ranks[0].buffers
        tensors = {name: tensor for name, tensor in tensors_of(self._model).items() if name in buffers}
        layout = fsdp2_layout(tensors, whole=stored.layout)
        stored.files.fill(layout, self._worker.rank, {name: local(tensor) for name, tensor in tensors.items()})

    # -- an update -------------------------------------------------------------------------------------------------

    def forward(self, batch: Any, *, entropies: bool = False, adapter: bool = True) -> ModelOutputs:
        return self._aligned.run(self._pass(batch, False), batch, lambda: self._answers(batch, entropies, adapter))

    @torch.no_grad()
    def _answers(self, batch: Any, entropies: bool = False, adapter: bool = True) -> ModelOutputs:
        def answers() -> ModelOutputs:
            if not adapter:
                return self._kind.base_answers(self._model, batch)
            return self._kind.answers(self._model, batch, entropies=entropies)

        with shared_rows(self._row_ranks):
            outputs = self._root(answers)
        cast(FSDPModule, self._root).reshard()
        return outputs

    def begin(self, num_statistics: int) -> None:
        self._aligned.finish()
        self._waiting.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._statistics = StatisticSums(self.shards, num_statistics)
        self._checks = DeferredChecks()

    def backward(self, shard: int, batch: Any, loss_of: LossOf, *, entropies: bool = False) -> None:
        self._waiting.append((self._pass(batch, True), shard, batch, loss_of, entropies))

    def count(self, shard: int, statistics: Statistics) -> None:
        self._statistics.add(shard, statistics)

    def finish_backward(self) -> list[float]:
        # Sorted, so that passes of one kind run at the same time on all ranks.
        for own_pass, number, batch, loss_of, entropies in sorted(self._waiting, key=itemgetter(0)):
            self._aligned.run(own_pass, batch, partial(self._backward, number, batch, loss_of, entropies))
        self._aligned.finish()
        self._waiting.clear()
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        statistics = torch.stack(self._statistics.of_shards()).sum(0)
        self._checks.raise_if_failed()
        return self._worker.replicas.sum_(statistics).tolist()

    def _backward(self, shard: int, batch: Any, loss_of: LossOf, entropies: bool) -> None:
        def loss() -> Tensor:
            total, statistics = loss_of(self._kind.answers(self._model, batch, entropies=entropies))
            self.count(shard, statistics)
            return total

        self._backpropagate(loss)

    def _backpropagate(self, loss: Callable[[], Tensor]) -> None:
        checks = self._checks.collecting() if defers_checks(self._worker.device) else nullcontext()
        with shared_rows(self._row_ranks), checks:
            total = self._root(loss)
        total.backward()

    def dummy_pass(self, batch: Any, backward: bool) -> None:
        if not backward:
            self._answers(batch)
            return

        def nothing() -> Tensor:
            outputs = self._kind.answers(self._model, batch, entropies=False)
            return 0.0 * (outputs.logprobs.sum() + outputs.values.sum())

        self._backpropagate(nothing)

    def _pass(self, batch: Any, backward: bool) -> Pass:
        return self._number, int(backward), self._kind.num_calls(batch)

    @torch.no_grad()
    def step(self, divisor: float) -> float:
        gradients = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        if self._is_fused:
            torch._foreach_mul_(gradients, 1.0 / divisor)
            squares = gradient_norm(gradients).double().square()[None]
        else:
            squares = torch.zeros(1, dtype=torch.float64, device=self._worker.device)
            for gradient in gradients:
                gradient *= 1.0 / divisor
                squares += gradient.double().square().sum()
        grad_norm = math.sqrt(self._worker.ranks.sum_(squares.cpu()).item())
        self._settings.begin_step(self._optimizer, self.num_steps, grad_norm, self._worker)
        if (factor := self._settings.clip_factor(grad_norm)) < 1.0:
            torch._foreach_mul_(gradients, factor)
        place_steps(self._optimizer)
        self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None  # the gradient is not needed any more, so it must not be offloaded
        self.num_steps += 1
        return grad_norm

    def sum_over_shards(self, rows: Tensor) -> Tensor:
        self._aligned.finish()
        return self._worker.replicas.sum_(rows.sum(0))

    def restart(self, optimizer: OptimizerSettings) -> None:
        self._settings = optimizer
        self._optimizer = optimizer.adamw(self._parameters.items(), fused=self._is_fused or None)
        self.num_steps = 0

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights(self, *, merged: bool = True) -> Mapping[str, Tensor]:
        """Gathers adapters and merges each into this rank's rows of its weight; unmerged, nothing is gathered."""
        served, rank, num_ranks = self._served(), self._worker.rank, self._worker.num_ranks
        if not merged:
            return {name: local(tensor) for name, tensor in served.unmerged().items()}
        held = {name: local(tensor) for name, tensor in served.weights.items()}
        changes: dict[str, WeightChange] = {}
        for name, change in served.changes.items():
            assert isinstance(change, LowRank), "transformers' modules hold one canonical tensor each"
            rows, columns = shard_place(name, served.weights[name], rank, num_ranks)
            a, b = whole(change.a)[:, columns], whole(change.b)[rows]
            changes[name] = LowRank(a=a, b=b, scale=change.scale)
        return Served(weights=held, changes=changes).merged()

    def layout(self, *, merged: bool = True) -> Layout:
        return fsdp2_layout(self._served().weights if merged else self._served().unmerged())

    def _served(self) -> Served:
        return self._kind.served(tensors_of(self._model))

    def start_from(self, other: FSDP2Backend) -> None:
        copy_alike(tensors_of(other._model), tensors_of(self._model))

    @torch.no_grad()
    def on_model(self, do: Callable[[Any], T]) -> T:
        return do(self._model)

    def onload(self) -> None:
        if self._device != self._worker.device:
            self._move(lambda _, tensor: self._places.bring(tensor, self._worker.device))

    def offload(self) -> None:
        if self._device != HOST:
            self._move(self._places.take)

    @property
    def _is_fused(self) -> bool:
        """Whether the optimizer's step is one pass over the memory: on GPUs."""
        return self._worker.device.type == "cuda"

    @property
    def _device(self) -> torch.device:
        """The device that holds the state."""
        return next(iter(self._parameters.values())).device

    def _move(self, elsewhere: Callable[[str, Tensor], Tensor]) -> None:
        move(self._root, elsewhere)
        move_moments(self._optimizer, lambda name, moment: on_shard(partial(elsewhere, name), moment))

    # -- files -----------------------------------------------------------------------------------------------------

    def model_tensors(self) -> dict[str, Tensor]:
        return self._kind.to_files(self._bare, self._gathered(self._kind.saved(tensors_of(self._model))))

    def load_model(self, folder: str) -> None:
        if self._is_outline:
            self._read(self._kind.stored_weights(self._model, folder))
            return
        model = whole_model(self._bare)
        self._kind.load(model, folder)
        mine = self._kind.saved(tensors_of(self._model))
        fill(mine, model.state_dict(), self._worker.rank, self._worker.num_ranks)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return self._gathered(optimizer_tensors(self._optimizer, self._model))

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors that this rank writes; the state of a parameter is written by the rank that writes it."""
        self._aligned.finish()
        wholes = {name: gathered(tensor, self._writers[name.partition(":")[0]]) for name, tensor in tensors.items()}
        return {name: whole for name, whole in wholes.items() if whole is not None}

    @cached_property
    def _writers(self) -> dict[str, int]:
        return writers(self._kind, self._bare, self._worker.num_ranks)

    def load_optimizer(self, folder: str) -> None:
        """Reads this rank's shards of the moments."""
        self._optimizer.state.clear()
        files = WeightFiles(folder, OPTIMIZER)
        for key in files.specs:
            name, field = parameter_of(key, self._parameters, folder)
            parameter = self._parameters[name]
            if field == "step":
                self._optimizer.state[parameter][field] = files.read(key).clone()
                continue
            moment = torch.zeros_like(parameter, requires_grad=False)
            box = shard_boxes(name, parameter, list(range(self._worker.num_ranks)))[self._worker.rank]
            local(moment).copy_(files.read(key, box))
            self._optimizer.state[parameter][field] = moment
        self.num_steps = num_steps_in(folder)

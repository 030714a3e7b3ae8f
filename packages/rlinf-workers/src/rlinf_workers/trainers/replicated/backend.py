"""ReplicatedBackend: every rank holds the whole model and computes its shards of a batch.

It guarantees more than the protocol: on CPUs, two ranks give the numbers of one. A recipe fixes the shards, a plan the
ranks, and shard s belongs to rank s % num_ranks. Each shard accumulates its micro-batches in its own buffer, and the
buffers are summed in the order of the shards: first locally if a rank has several, then over ranks. With one rank the
sum is (s0 + s1), with two it is the all-reduce of s0 and s1: the same float additions, so the same bits. Of four shards
two ranks compute (s0 + s2) + (s1 + s3), which equals one rank's sum up to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rlinf_algos import DeferredChecks
from rlinf_comm.weights import Layout, specs_of
from rlinf_workers.models.compiled_layers import Compiles, compile_layers
from rlinf_workers.models.placement import (
    HOST,
    HostPlaces,
    MovedModel,
    copy_alike,
    move_moments,
    place_steps,
    tensors_of,
)
from rlinf_workers.models.sequence_parallel import shared_rows
from rlinf_workers.trainers.base import (
    LossOf,
    ModelAdapter,
    ModelOutputs,
    OptimizerSettings,
    defers_checks,
    sequence_ranks,
    shards_of,
)
from rlinf_workers.trainers.checkpoint import host_copy, load_optimizer, optimizer_tensors, writers
from rlinf_workers.trainers.denormals import flushed_denormals
from rlinf_workers.trainers.gradient_norm import gradient_norm
from rlinf_workers.trainers.served import Served
from rlinf_workers.trainers.statistics import Statistics, StatisticSums
from rlinf_workers.worker import Worker

T = TypeVar("T")


class ReplicatedBackend:
    """The model, a gradient buffer per shard and dtype of parameters, and the optimizer; see trainers/base.py for the
    contract of the methods."""

    _optimizer: torch.optim.AdamW
    num_steps = 0

    def __init__(
        self,
        model: ModelAdapter,
        worker: Worker,
        *,
        optimizer: OptimizerSettings | None,
        num_shards: int,
        sequence_parallel: int = 1,
        compile: Compiles = "auto",  # the option's name
    ) -> None:
        """Args:
        sequence_parallel: ranks of a replica, which compute each micro-batch together.
        compile: compile the decoder layers for packed rows.

        Raises: ValueError naming the key of the recipe.
        """
        self._kind, self._worker = model, worker
        self._row_ranks = sequence_ranks(model, worker, 1 if optimizer is None else sequence_parallel)
        self._model = model.build(HOST)
        compile_layers(self._model, compile, worker.device, worker.note)
        self._places = HostPlaces()
        self._moved = MovedModel(self._model, self._places)
        self.shards: Sequence[int] = []
        """Empty if the model is frozen."""
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        """(Shard, dtype of parameters) -> their gradients, flat."""
        self._statistics, self._checks = StatisticSums(), DeferredChecks()
        self._attached: int | None = None
        """The shard whose buffer the parameters' gradients are views of."""
        self._is_updating = False
        """Between `begin` and `step`, when gradients must be kept."""
        if optimizer is None:
            self._model.requires_grad_(False)
            return
        ranks = worker.replicas
        self.shards = shards_of(num_shards, ranks.rank, ranks.num_ranks)
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if worker.device == HOST:
            self._make_buffers()
        self.restart(optimizer)

    @property
    def kind(self) -> ModelAdapter:
        return self._kind

    # -- an update -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: Any, *, entropies: bool = False, adapter: bool = True) -> ModelOutputs:
        with shared_rows(self._row_ranks):
            if not adapter:
                return self._kind.base_answers(self._model, batch)
            return self._kind.answers(self._model, batch, entropies=entropies)

    def _make_buffers(self) -> None:
        sizes, device = Counter[torch.dtype](), self._parameters[0].device
        for parameter in self._parameters:
            sizes[parameter.dtype] += parameter.numel()
        self._buffers = {
            (shard, dtype): torch.zeros(size, dtype=dtype, device=device)
            for shard in self.shards
            for dtype, size in sizes.items()
        }

    def begin(self, num_statistics: int) -> None:
        if not self._buffers:
            self._make_buffers()
        self._is_updating = True
        for buffer in self._buffers.values():
            buffer.zero_()
        self._statistics = StatisticSums(self.shards, num_statistics)
        self._checks = DeferredChecks()

    def backward(self, shard: int, batch: Any, loss_of: LossOf, *, entropies: bool = False) -> None:
        checks = self._checks.collecting() if defers_checks(self._worker.device) else nullcontext()
        with shared_rows(self._row_ranks), checks:
            loss, statistics = loss_of(self._kind.answers(self._model, batch, entropies=entropies))
        self._attach(shard)
        loss.backward()
        self.count(shard, statistics)

    def count(self, shard: int, statistics: Statistics) -> None:
        self._statistics.add(shard, statistics)

    def finish_backward(self) -> list[float]:
        first, *others = self.shards
        statistics, *more = self._statistics.of_shards()
        self._checks.raise_if_failed()
        for one in more:
            statistics += one
        for dtype, total in self._of_shard(first).items():
            for shard in others:
                total += self._buffers[shard, dtype]
            # Ranks that share micro-batches have the gradients of their own tokens.
            (self._worker.replicas if self._row_ranks is None else self._worker.ranks).sum_(total)
        self._attach(first)
        return self._worker.replicas.sum_(statistics).tolist()

    def step(self, divisor: float) -> float:
        self._is_updating = False
        totals = list(self._of_shard(self.shards[0]).values())
        for total in totals:
            total *= 1.0 / divisor
        grad_norm = float(gradient_norm([cast(Tensor, one.grad) for one in self._parameters]))
        self._settings.begin_step(self._optimizer, self.num_steps, grad_norm, self._worker)
        if (factor := self._settings.clip_factor(grad_norm)) < 1.0:
            for total in totals:
                total *= factor
        self._take_step()
        self.num_steps += 1
        return grad_norm

    def _take_step(self) -> None:
        """Steps with the clipped mean in every parameter's `.grad`."""
        place_steps(self._optimizer)
        with flushed_denormals():
            self._optimizer.step()

    def sum_over_shards(self, rows: Tensor) -> Tensor:
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return self._worker.replicas.sum_(total)

    def restart(self, optimizer: OptimizerSettings) -> None:
        self._settings = optimizer
        named = ((name, one) for name, one in self._model.named_parameters() if one.requires_grad)
        # torch's default is a pass over the memory for each term of the formula, on GPUs with a copy of the weights.
        self._optimizer = optimizer.adamw(named, fused=True)
        self.num_steps = 0

    def _of_shard(self, shard: int) -> dict[torch.dtype, Tensor]:
        """The buffers of a shard, by dtype."""
        return {dtype: buffer for (number, dtype), buffer in self._buffers.items() if number == shard}

    def _attach(self, shard: int) -> None:
        """Makes the parameters' gradients views of a shard's buffers, unless they are."""
        if self._attached == shard:
            return
        self._attached = shard
        for dtype, buffer in self._of_shard(shard).items():
            parameters = [parameter for parameter in self._parameters if parameter.dtype == dtype]
            pieces = buffer.split([parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights(self, *, merged: bool = True) -> Mapping[str, Tensor]:
        return self._served().merged() if merged else self._served().unmerged()

    def layout(self, *, merged: bool = True) -> Layout:
        served = self._served()
        return Layout.replicated(specs_of(served.weights if merged else served.unmerged()), self._worker.num_ranks)

    def _served(self) -> Served:
        return self._kind.served(tensors_of(self._model))

    def start_from(self, other: ReplicatedBackend) -> None:
        copy_alike(other.weights(), self.weights())

    @torch.no_grad()
    def on_model(self, do: Callable[[Any], T]) -> T:
        return do(self._model)

    def onload(self) -> None:
        if not self._moved.is_on(self._worker.device):
            self._return_to(self._worker.device)

    def offload(self) -> None:
        if not self._moved.is_on(HOST):
            self._leave()

    def _leave(self) -> None:
        """Offloads to host memory. Gradients are detached from the parameters; between two updates they are freed."""
        attached = self._detach()
        self._moved.leave()
        if self._is_updating:
            self._buffers = {at: self._places.take(f"gradient {at}", buffer) for at, buffer in self._buffers.items()}
        else:
            self._buffers, attached = {}, None
        self._move_moments(self._places.take)
        self._reattach(attached)

    def _return_to(self, device: torch.device) -> None:
        attached = self._detach()
        self._moved.return_to(device)
        self._buffers = {at: self._places.bring(buffer, device) for at, buffer in self._buffers.items()}
        self._move_moments(lambda _, moment: self._places.bring(moment, device))
        self._reattach(attached)

    def _move_moments(self, moved: Callable[[str, Tensor], Tensor]) -> None:
        if self.shards:
            move_moments(self._optimizer, moved)

    def _detach(self) -> int | None:
        """Returns: the shard that was attached."""
        for parameter in self._model.parameters():
            parameter.grad = None
        attached, self._attached = self._attached, None
        return attached

    def _reattach(self, shard: int | None) -> None:
        if shard is not None:
            self._attach(shard)

    # -- files -----------------------------------------------------------------------------------------------------

    def model_tensors(self) -> dict[str, Tensor]:
        saved = self._kind.saved(tensors_of(self._model))
        mine = {name: host_copy(tensor) for name, tensor in saved.items() if self._writes(name)}
        return self._kind.to_files(self._model, mine)

    def load_model(self, folder: str) -> None:
        self._kind.load(self._model, folder)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        tensors = optimizer_tensors(self._optimizer, self._model)
        return {key: host_copy(value) for key, value in tensors.items() if self._writes(key.rpartition(":")[0])}

    def load_optimizer(self, folder: str) -> None:
        self.num_steps = load_optimizer(self._optimizer, self._model, folder)

    def _writes(self, name: str) -> bool:
        """Whether this rank writes a tensor of the model and its state."""
        return self._writers[name] == self._worker.rank

    @cached_property
    def _writers(self) -> dict[str, int]:
        return writers(self._kind, self._model, self._worker.num_ranks)

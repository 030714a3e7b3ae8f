"""FSDP2Backend: the ranks of a group hold one model together and each works on its shards of a batch.

Weights, gradients and the optimizer's moments are cut over the ranks; a layer is gathered when a pass comes to it and
given up behind it. A gradient goes into the shards as soon as a layer's backward pass ends, so no rank ever has a
gradient of the whole model. `backward` keeps the micro-batch, and `reduce` makes the passes: then every rank has read
all of its items, and none waits in a collective for one that waits for a device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from rlinf_comm.weights import Layout
from rlinf_comm.weights.layouts.fsdp2 import fsdp2 as fsdp2_layout
from rlinf_workers.models.parts import KeptParts
from rlinf_workers.models.placement import tensors_of
from rlinf_workers.models.weight_names import StoredWeights
from rlinf_workers.training.base import Evaluation, LossOf, OptimizerSettings, Trainable, TrainingBackend
from rlinf_workers.training.fsdp2.rounds import Pass, Rounds
from rlinf_workers.training.fsdp2.sharding import (
    fill,
    gathered,
    give_memory,
    local,
    part_of,
    recompute_feed_forward,
    shard,
    skeleton,
    whole_model,
)
from rlinf_workers.training.replicated.backend import COUNT_FILE, STATE_FILE, ReplicatedBackend
from rlinf_workers.worker import Worker

T = TypeVar("T")
DTYPES = ("float32", "bfloat16")


def fsdp2(
    model: Trainable,
    worker: Worker,
    *,
    optimizer: OptimizerSettings | None,
    num_shards: int,
    compute_dtype: str = "float32",
    recompute: bool = False,
) -> TrainingBackend:
    """A sharded model; whole on every rank where it is frozen, because ranks are then asked at different times.

    Args:
        compute_dtype: "bfloat16" computes in it; weights, reductions and moments stay as the model's dtype is.
        recompute: the backward pass computes the feed-forward half of each layer again.

    Raises: ValueError naming the key of the recipe.
    """
    if compute_dtype not in DTYPES:
        raise ValueError(f"actor.backend_options: compute_dtype={compute_dtype!r} is not one of {', '.join(DTYPES)}")
    lower = torch.bfloat16 if compute_dtype == "bfloat16" else None
    if optimizer is None:
        return ReplicatedBackend(_InDtype(model, lower) if lower else model, worker, optimizer=None, num_shards=1)
    return FSDP2Backend(model, worker, optimizer=optimizer, num_shards=num_shards, lower=lower, recompute=recompute)


class _InDtype(Trainable):
    """A frozen model whose parameters are held in the dtype that trained ones are computed in."""

    def __init__(self, kind: Trainable, dtype: torch.dtype) -> None:
        self._kind, self._dtype = kind, dtype
        self.answers, self.save, self.load = kind.answers, kind.save, kind.load

    def build(self, device: torch.device) -> nn.Module:
        model = self._kind.build(device)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self._dtype)
        return model

    def answers(self, model: Any, batch: Any, *, entropies: bool) -> Evaluation:
        return self._kind.answers(model, batch, entropies=entropies)


class FSDP2Backend:
    """A model that is trained, see training/base.py for what the methods promise."""

    _optimizer: torch.optim.AdamW
    num_steps = 0

    def __init__(
        self,
        model: Trainable,
        worker: Worker,
        *,
        optimizer: OptimizerSettings,
        num_shards: int,
        lower: torch.dtype | None,
        recompute: bool,
    ) -> None:
        if worker.identity.num_ranks_per_replica > 1:
            raise ValueError(
                "plan.num_ranks_per_replica.actor: fsdp2 cuts the model over all ranks of the actor and gives each "
                "its own micro-batches; leave the key out"
            )
        if num_shards % worker.num_ranks:
            raise ValueError(
                f"actor.num_shards={num_shards} is not a multiple of its {worker.num_ranks} ranks; "
                f"use {worker.num_ranks} or a multiple of it"
            )
        self._kind, self._worker = model, worker
        self._rounds = Rounds.of(worker)
        self._number = self._rounds.enter(self)
        with KeptParts(worker.rank, worker.num_ranks) as parts:
            outline = model.outline()
        self._is_outline = outline is not None
        self._model = model.build(torch.device("cpu")) if outline is None else outline
        self._bare = skeleton(self._model)
        if recompute:
            recompute_feed_forward(self._model)
        if not dist.is_initialized():  # one rank alone; a mesh needs a group all the same
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(worker.device.type, (worker.num_ranks,))
        first = {name: parts.take(p) for name, p in self._model.named_parameters() if p.is_meta}
        self._root = shard(self._model, mesh, lower)
        give_memory(self._model, first, worker.device)
        self._root.to(worker.device)  # buffers; and fully_shard sees the new parameters
        if self._is_outline and (stored := self._kind.first_weights(self._model)) is not None:
            self._read(stored)
        self.shards: Sequence[int] = range(worker.rank, num_shards, worker.num_ranks)
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._waiting: list[tuple[Pass, int, Any, LossOf, bool]] = []
        """Micro-batches whose backward pass comes with `reduce`: pass, shard, batch, loss, whether with entropies."""
        self._statistics: dict[int, Tensor] = {}
        self.restart(optimizer)

    def _read(self, stored: StoredWeights) -> None:
        buffers = stored.layout.ranks[0].buffers
        tensors = {name: tensor for name, tensor in tensors_of(self._model).items() if name in buffers}
        layout = fsdp2_layout(tensors, whole=stored.layout)
        stored.files.fill(layout, self._worker.rank, {name: local(tensor) for name, tensor in tensors.items()})

    # -- an update -------------------------------------------------------------------------------------------------

    def forward(self, batch: Any, *, entropies: bool = False) -> Evaluation:
        return self._rounds.take(self._pass(batch, False), batch, lambda: self._answers(batch, entropies))

    @torch.no_grad()
    def _answers(self, batch: Any, entropies: bool) -> Evaluation:
        found = self._root(lambda: self._kind.answers(self._model, batch, entropies=entropies))
        cast(FSDPModule, self._root).reshard()
        return found

    def begin(self, num_statistics: int) -> None:
        self._rounds.finish()
        self._waiting.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._statistics = {number: torch.zeros(num_statistics, dtype=torch.float64) for number in self.shards}

    def backward(self, shard: int, batch: Any, loss_of: LossOf, *, entropies: bool = False) -> None:
        self._waiting.append((self._pass(batch, True), shard, batch, loss_of, entropies))

    def count(self, shard: int, statistics: Sequence[float]) -> None:
        self._statistics[shard] += torch.tensor(statistics, dtype=torch.float64)

    def reduce(self) -> list[float]:
        # Sorted, passes of one kind meet on all ranks.
        for wanted, number, batch, loss_of, entropies in sorted(self._waiting, key=itemgetter(0)):
            self._rounds.take(wanted, batch, partial(self._backward, number, batch, loss_of, entropies))
        self._rounds.finish()
        self._waiting.clear()
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self._worker.ranks.sum_(torch.stack(list(self._statistics.values())).sum(0)).tolist()

    def _backward(self, shard: int, batch: Any, loss_of: LossOf, entropies: bool) -> None:
        def loss() -> Tensor:
            total, statistics = loss_of(self._kind.answers(self._model, batch, entropies=entropies))
            self.count(shard, statistics)
            return total

        self._root(loss).backward()

    def idle(self, batch: Any, backward: bool) -> None:
        if not backward:
            self._answers(batch, False)
            return

        def nothing() -> Tensor:
            found = self._kind.answers(self._model, batch, entropies=False)
            return 0.0 * (found.logprobs.sum() + found.values.sum())

        self._root(nothing).backward()

    def _pass(self, batch: Any, backward: bool) -> Pass:
        return self._number, int(backward), self._kind.num_calls(batch)

    @torch.no_grad()
    def step(self, divisor: float) -> float:
        gradients = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        squares = torch.zeros(1, dtype=torch.float64)
        for gradient in gradients:
            gradient *= 1.0 / divisor
            squares += gradient.double().square().sum().cpu()
        grad_norm = math.sqrt(self._worker.ranks.sum_(squares).item())
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"{self._worker.name}: optimizer step {self.num_steps}: the gradient norm is {grad_norm}; "
                "nothing was changed"
            )
        for gradient in gradients:
            gradient *= min(1.0, self._settings.max_grad_norm / (grad_norm + 1e-6))  # as torch clips
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate_at(self.num_steps)
        self._optimizer.step()
        self.num_steps += 1
        return grad_norm

    def sum_over_shards(self, rows: Tensor) -> Tensor:
        self._rounds.finish()
        return self._worker.ranks.sum_(rows.sum(0))

    def restart(self, optimizer: OptimizerSettings) -> None:
        self._settings = optimizer
        self._optimizer = optimizer.adamw(self._parameters.values())
        self.num_steps = 0

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        return {name: local(tensor) for name, tensor in tensors_of(self._model).items()}

    def layout(self) -> Layout:
        return fsdp2_layout(tensors_of(self._model))

    @torch.no_grad()
    def start_from(self, other: FSDP2Backend) -> None:
        theirs = tensors_of(other._model)
        for name, tensor in tensors_of(self._model).items():
            if name in theirs and theirs[name].shape == tensor.shape:
                local(tensor).copy_(local(theirs[name]))

    @torch.no_grad()
    def on_model(self, do: Callable[[Any], T]) -> T:
        return do(self._model)

    def onload(self) -> None:
        self._move(self._worker.device)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        if next(iter(self._parameters.values())).device == device:
            return
        self._root.to(device)  # gradients go with their parameters
        for state in self._optimizer.state.values():
            state.update({key: value.to(device) for key, value in state.items() if key != "step"})

    # -- files -----------------------------------------------------------------------------------------------------

    def save_model(self, folder: str) -> None:
        self._rounds.finish()
        is_first = self._worker.rank == 0
        found: dict[Tensor, Tensor | None] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if tensor not in found:
                found[tensor] = gathered(tensor, is_first)
            state[name] = cast(Tensor, found[tensor])
        if is_first:
            os.makedirs(folder, exist_ok=True)
            model = skeleton(self._bare)
            model.load_state_dict(state, assign=True)
            self._kind.save(model, folder)
        self._worker.ranks.barrier()

    def load_model(self, folder: str) -> None:
        if self._is_outline:
            self._read(self._kind.stored_weights(self._model, folder))
            return
        model = whole_model(self._bare)
        self._kind.load(model, folder)
        fill(tensors_of(self._model), model.state_dict(), self._worker.rank, self._worker.num_ranks)

    def save_optimizer(self, folder: str) -> None:
        is_first = self._worker.rank == 0
        state: dict[str, Tensor | None] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"{name}:{key}"] = gathered(value, is_first)
        if is_first:
            os.makedirs(folder, exist_ok=True)
            save_file(cast(dict[str, Tensor], state), f"{folder}/{STATE_FILE}")
            Path(folder, COUNT_FILE).write_text(json.dumps({"num_steps": self.num_steps}))
        self._worker.ranks.barrier()

    def load_optimizer(self, folder: str) -> None:
        """Reads of the moments what this rank keeps."""
        path = f"{folder}/{STATE_FILE}"
        self._optimizer.state.clear()
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118, it is no mapping
                name, _, field = key.rpartition(":")
                if name not in self._parameters:
                    raise ValueError(f"{path}: holds state for {name!r}, which the model does not have")
                parameter = self._parameters[name]
                if field == "step":
                    self._optimizer.state[parameter][field] = file.get_tensor(key)
                    continue
                moment = torch.zeros_like(parameter, requires_grad=False)
                part = part_of(name, parameter, self._worker.rank, self._worker.num_ranks)
                local(moment).copy_(file.get_slice(key)[part])
                self._optimizer.state[parameter][field] = moment
        self.num_steps = int(json.loads(Path(folder, COUNT_FILE).read_text())["num_steps"])

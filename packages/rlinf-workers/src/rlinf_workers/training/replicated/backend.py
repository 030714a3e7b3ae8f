"""ReplicatedBackend: every rank holds the whole model and works on its shards of a batch.

It promises more than the protocol asks: on CPUs the numbers do not depend on the number of ranks, where the shards do
not (gradients.py says how far).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlinf_comm.weights import Layout, specs_of
from rlinf_workers.training.base import Answers, LossOf, OptimizerSettings, Place, Step, Trainable
from rlinf_workers.training.checkpoint import load_optimizer, move_optimizer, read_json, save_optimizer, write_json
from rlinf_workers.training.replicated.gradients import ShardedGradients

T = TypeVar("T")
STATE_FILE, COUNT_FILE = "optimizer.safetensors", "optimizer.json"


class ReplicatedBackend:
    """The model, its sharded gradients and its optimizer; see training/base.py for what the methods promise."""

    _gradients: ShardedGradients
    _optimizer: torch.optim.AdamW
    num_steps = 0

    def __init__(self, model: Trainable, place: Place, *, optimizer: OptimizerSettings | None, num_shards: int) -> None:
        self._kind = model
        self._place = place
        self._model = model.build(place.device)
        self._is_frozen = optimizer is None
        if optimizer is None:
            self._model.requires_grad_(False)
        else:
            self._gradients = ShardedGradients(self._model.parameters(), num_shards, place.replicas)
            self.restart(optimizer)

    # -- an update -------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> Sequence[int]:
        return self._gradients.shards

    @torch.no_grad()
    def forward(self, batch: Any, *, entropies: bool = False) -> Answers:
        return self._kind.answers(self._model, batch, entropies=entropies)

    def begin(self, num_statistics: int) -> None:
        self._gradients.zero(num_statistics)

    def backward(self, shard: int, batch: Any, loss_of: LossOf, *, entropies: bool = False) -> None:
        loss, statistics = loss_of(self._kind.answers(self._model, batch, entropies=entropies))
        self._gradients.backward(shard, loss)
        self._gradients.count(shard, statistics)

    def count(self, shard: int, statistics: Sequence[float]) -> None:
        self._gradients.count(shard, statistics)

    def reduce(self) -> list[float]:
        return self._gradients.reduce().tolist()

    def step(self, divisor: float) -> Step:
        self._gradients.scale_(1.0 / divisor)
        grad_norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm))
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"{self._place.name}: optimizer step {self.num_steps}: the gradient norm is {grad_norm}; "
                "nothing was changed"
            )
        rate = self._settings.learning_rate_at(self.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._take_step()
        self.num_steps += 1
        return Step(grad_norm, rate)

    def _take_step(self) -> None:
        """Every parameter's `.grad` is the clipped mean."""
        self._optimizer.step()

    def sum_over_shards(self, rows: Tensor) -> Tensor:
        return self._gradients.sum_over_shards(rows)

    def restart(self, optimizer: OptimizerSettings) -> None:
        self._settings = optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
        )
        self.num_steps = 0

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        return self._kind.tensors(self._model)

    def layout(self) -> Layout:
        return Layout.replicated(specs_of(self.weights()), self._place.num_ranks)

    @torch.no_grad()
    def start_from(self, other: ReplicatedBackend) -> None:
        theirs = other.weights()
        for name, tensor in self.weights().items():
            if name in theirs and theirs[name].shape == tensor.shape:
                tensor.copy_(theirs[name])

    @torch.no_grad()
    def on_model(self, do: Callable[[Any], T]) -> T:
        return do(self._model)

    def onload(self) -> None:
        self._move(self._place.device)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        if next(self._model.parameters()).device == device:  # `Module.to` walks over all modules, moved or not
            return
        if self._is_frozen:
            self._model.to(device)
            return
        self._gradients.move(device, lambda: self._model.to(device))
        move_optimizer(self._optimizer, device)

    # -- files -----------------------------------------------------------------------------------------------------

    def save_model(self, folder: str) -> None:
        if self._place.rank == 0:
            os.makedirs(folder, exist_ok=True)
            self._kind.save(self._model, folder)

    def load_model(self, folder: str) -> None:
        self._kind.load(self._model, folder)

    def save_optimizer(self, folder: str) -> None:
        if self._place.rank == 0:
            save_optimizer(self._optimizer, self._model, f"{folder}/{STATE_FILE}")
            write_json(f"{folder}/{COUNT_FILE}", {"num_steps": self.num_steps})

    def load_optimizer(self, folder: str) -> None:
        load_optimizer(self._optimizer, self._model, f"{folder}/{STATE_FILE}")
        self.num_steps = int(read_json(f"{folder}/{COUNT_FILE}")["num_steps"])

"""What every worker that trains a model has: state that moves on and off its devices, optimizer steps, checkpoints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from rlinf_workers.models.placement import move_model
from rlinf_workers.training.checkpoint import load_optimizer, move_optimizer, read_json, save_optimizer, write_json
from rlinf_workers.training.replicated.gradients import ShardedGradients
from rlinf_workers.worker import Worker


def optimizer_step(
    model: nn.Module,
    gradients: ShardedGradients,
    optimizer: torch.optim.Optimizer,
    *,
    num_terms: float,
    max_grad_norm: float,
    where: str,
) -> float:
    """Turns the reduced gradient, a sum over `num_terms`, into a mean, clips it, steps. Returns its norm before
    clipping.

    Raises: FloatingPointError when the norm is not finite; the weights are as before.
    """
    gradients.scale_(1.0 / num_terms)
    grad_norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
    if not math.isfinite(grad_norm):
        raise FloatingPointError(f"{where}: the gradient norm is {grad_norm}; nothing was changed")
    optimizer.step()
    return grad_norm


class TrainingWorker(Worker):
    """A model, its sharded gradients and its optimizer.

    A subclass sets the three attributes in its constructor, steps through `_optimizer_step`, and says where its weights
    are kept (`_save_weights`, `_load_weights`).
    """

    _model: Any
    """A torch module."""
    _gradients: ShardedGradients
    _optimizer: torch.optim.Optimizer
    _version = 0
    """Optimizer steps taken, those of a warm start included."""
    _policy_steps = 0
    """Optimizer steps of reinforcement learning."""

    @property
    def policy_version(self) -> int:
        return self._version

    # -- one optimizer step ----------------------------------------------------------------------------------------

    def _optimizer_step(self, optimizer: torch.optim.Optimizer, *, num_terms: float, max_grad_norm: float) -> float:
        """`optimizer_step` of this worker's model; counts it."""
        where = f"{self.name}: optimizer step {self._version}"
        grad_norm = optimizer_step(
            self._model, self._gradients, optimizer, num_terms=num_terms, max_grad_norm=max_grad_norm, where=where
        )
        self._version += 1
        return grad_norm

    # -- state on devices ------------------------------------------------------------------------------------------

    def onload(self) -> None:
        self._move(self.device)

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        self._gradients.release()
        if move_model(self._model, device):
            move_optimizer(self._optimizer, device)
            self._gradients.move(device)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, folder: str) -> None:
        """Everything that training needs to go on as if it had not stopped. Rank 0 writes, the others do nothing."""
        if self.rank == 0:
            self._save_weights(folder)
            save_optimizer(self._optimizer, self._model, f"{folder}/optimizer.safetensors")
            write_json(f"{folder}/actor.json", {"policy_version": self._version, "policy_steps": self._policy_steps})

    def load_checkpoint(self, folder: str) -> None:
        """The inverse, on every rank."""
        self._load_weights(folder)
        load_optimizer(self._optimizer, self._model, f"{folder}/optimizer.safetensors")
        state = read_json(f"{folder}/actor.json")
        self._version, self._policy_steps = int(state["policy_version"]), int(state["policy_steps"])

    def _save_weights(self, folder: str) -> None:
        raise NotImplementedError(f"{type(self).__name__} has to define _save_weights()")

    def _load_weights(self, folder: str) -> None:
        raise NotImplementedError(f"{type(self).__name__} has to define _load_weights()")

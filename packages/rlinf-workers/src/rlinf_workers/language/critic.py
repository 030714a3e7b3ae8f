"""Critic: a model like the actor's whose head says one number a token, the reward still to come.

It lives in the actor's processes and trains on the actor's shards (docs/decisions/011): no stage, no second hand-over
of the groups, and its numbers depend on the plan as little as the actor's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_algos.algorithm import Algorithm
from rlinf_algos.value_loss import clipped_value_loss, huber_value_loss
from rlinf_workers.collectives import RankGroup
from rlinf_workers.language.learning_groups import LearningGroup
from rlinf_workers.models.language_model import ModelSettings, build_model
from rlinf_workers.models.placement import move_model
from rlinf_workers.models.sequences import SequenceBatch, completion_logits, pack_groups
from rlinf_workers.training.checkpoint import (
    load_optimizer,
    load_tensors,
    move_optimizer,
    read_json,
    save_optimizer,
    save_tensors,
    write_json,
)
from rlinf_workers.training.optimizer import OptimizerSettings
from rlinf_workers.training.replicated.gradients import ShardedGradients
from rlinf_workers.training.worker import optimizer_step


class Critic:
    """The value model, its gradients and its optimizer."""

    def __init__(
        self,
        algorithm: Algorithm,
        model: ModelSettings,
        optimizer: OptimizerSettings,
        *,
        num_shards: int,
        ranks: RankGroup,
        device: torch.device,
        pad_id: int,
    ) -> None:
        self._algorithm = algorithm
        self._settings = optimizer
        self._device = device
        self._pad_id = pad_id
        self._model = build_model(model, torch.device("cpu"))
        width = self._model.get_output_embeddings().in_features
        head = nn.Linear(width, 1, bias=True, dtype=self._model.dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self._model.set_output_embeddings(head)
        self._model.to(device)
        self._gradients = ShardedGradients(self._model.parameters(), num_shards, ranks, num_statistics=5)
        self._optimizer = optimizer.make(self._model.parameters())
        self._num_updates = 0

    @property
    def is_fresh(self) -> bool:
        """Not trained yet."""
        return self._num_updates == 0

    def start_from(self, policy: Any) -> None:
        """Takes over what the policy has learned so far (a warm start), all but its head."""
        head = {id(parameter) for parameter in self._model.get_output_embeddings().parameters()}
        mine = {name: p for name, p in self._model.named_parameters() if id(p) not in head}
        theirs = dict(policy.named_parameters())
        with torch.no_grad():
            for name, parameter in mine.items():
                parameter.copy_(theirs[name])

    @torch.no_grad()
    def values(self, batch: SequenceBatch) -> Tensor:
        """[B, T] float32, before each token is chosen."""
        return completion_logits(self._model, batch)[..., 0].float()

    def zero(self) -> None:
        """Starts an update."""
        self._gradients.zero()

    def backward(self, shard: int, groups: Sequence[LearningGroup]) -> None:
        """Adds the gradient of a micro-batch."""
        batch = pack_groups([group.samples for group in groups], self._pad_id).to(self._device)
        width, mask = batch.loss_mask.shape[1], batch.loss_mask
        old = torch.cat([group.values[:, :width] for group in groups if group.values is not None]).to(self._device)
        returns = torch.cat([group.returns[:, :width] for group in groups if group.returns is not None])
        returns = returns.to(self._device)
        values = completion_logits(self._model, batch)[..., 0].float()
        if self._algorithm.value_loss == "huber":
            assert self._algorithm.huber_delta is not None, "an algorithm with this loss has its delta"
            loss = huber_value_loss(values, old, returns, mask, delta=self._algorithm.huber_delta)
        else:
            loss = clipped_value_loss(values, old, returns, mask, clip=self._algorithm.value_clip)
        total, num_tokens = loss.loss_terms.sum(), float(mask.sum())
        errors = ((returns - old) * mask).double()
        targets = (returns * mask).double()
        self._gradients.backward(
            shard,
            total,
            [
                num_tokens,
                float(total.detach()),
                float(errors.square().sum()),
                float(targets.sum()),
                float(targets.square().sum()),
            ],
        )

    def step(self) -> dict[str, float]:
        """One optimizer step on the mean over tokens; what to record of it."""
        tokens, loss, squared_errors, returns, squared_returns = self._gradients.reduce().tolist()
        count = max(tokens, 1.0)
        self._settings.set_rate(self._optimizer, self._num_updates)
        grad_norm = optimizer_step(
            self._model,
            self._gradients,
            self._optimizer,
            num_terms=count,
            max_grad_norm=self._settings.max_grad_norm,
            where=f"critic: optimizer step {self._num_updates}",
        )
        self._num_updates += 1
        spread = squared_returns - returns * returns / count
        recorded = {"critic/loss": loss / count, "critic/grad_norm": grad_norm, "critic/return": returns / count}
        if spread > 1e-9 * squared_returns:  # returns that are all equal leave rounding
            recorded["critic/explained"] = 1.0 - squared_errors / spread
        return recorded

    # -- state on devices, checkpoints -----------------------------------------------------------------------------

    def move(self, device: torch.device) -> None:
        self._gradients.release()
        if move_model(self._model, device):
            move_optimizer(self._optimizer, device)
            self._gradients.move(device)

    def save(self, folder: str) -> None:
        save_tensors(dict(self._model.named_parameters()), f"{folder}/critic.safetensors")
        save_optimizer(self._optimizer, self._model, f"{folder}/critic_optimizer.safetensors")
        write_json(f"{folder}/critic.json", {"num_updates": self._num_updates})

    def load(self, folder: str) -> None:
        load_tensors(dict(self._model.named_parameters()), f"{folder}/critic.safetensors")
        load_optimizer(self._optimizer, self._model, f"{folder}/critic_optimizer.safetensors")
        self._num_updates = int(read_json(f"{folder}/critic.json")["num_updates"])

"""Supervised training of a policy, by the loss that it defines (`Policy.imitate`): an SFT warm-up on demonstrations,
and DAgger's updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.execution.ports import Reader
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.lora import LoraModel, LoraSettings
from rlinf_workers.policies.base import Policy, PolicySettings
from rlinf_workers.roles.records.embodied import DemonstratedBatch
from rlinf_workers.trainers.base import BackendSettings, ModelAdapter, ModelOutputs, OptimizerSettings
from rlinf_workers.trainers.sft_warm_up import WarmedUpWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class ImitatingActorSettings:
    """What all actors that may imitate are created with."""

    policy: PolicySettings
    backend: BackendSettings
    """Its shards are the shards of a batch."""
    optimizer: OptimizerSettings
    sft_warm_up: OptimizerSettings | None = None
    """Optimizer of the SFT warm-up; None: no warm-up."""
    micro_batch_size: int | None = None
    """Samples of a shard in one forward and backward pass; None: the shard's whole share of a minibatch."""
    lora: LoraSettings | None = None
    """Train an adapter of the policy's backbone; None: train the policy as its options say."""

    def adapted(self, policy: ModelAdapter) -> ModelAdapter:
        """The adapter of a policy, or with `lora` that of its low-rank updates."""
        if self.lora is None:
            return policy
        options = self.policy.options
        folder, dtype = str(options.get("folder") or ""), str(options.get("dtype") or "float32")
        base = ModelSettings(folder=folder, has_weights=bool(folder), dtype=dtype, seed=self.policy.seed)
        return LoraModel(policy, base, self.lora)


@dataclass(frozen=True)
class ImitatedRows:
    """Observations with the chunks to imitate, B rows."""

    fields: dict[str, Tensor]
    actions: Tensor
    noise: Tensor
    """[B, noise_size]"""

    def __getitem__(self, rows: Tensor) -> ImitatedRows:
        fields = {name: values[rows] for name, values in self.fields.items()}
        return ImitatedRows(fields=fields, actions=self.actions[rows], noise=self.noise[rows])

    def outputs(self, policy: Policy) -> ModelOutputs:
        """Log-probabilities that are the negated supervised losses, [B]."""
        return ModelOutputs(logprobs=-policy.imitate(self.fields, self.actions, self.noise))


class ImitatingActor(WarmedUpWorker):
    """Trains a policy by supervised learning. A subclass sets `_settings` before it creates its backends."""

    _settings: ImitatingActorSettings

    def imitate(self, demonstrated: Reader[DemonstratedBatch]) -> None:
        """Stage: supervised training with one optimizer step per `num_shards` batches, in their order. Only the
        observations of its first run update the policy's observation statistics."""
        assert self._settings.sft_warm_up, "the flow has an SFT warm-up, but the settings have none"
        received = [batch for chunk in demonstrated for batch in chunk]
        if self._version == 0:
            self._absorb(lambda policy: _sums_of_shown(policy, received, self._backend.shards))
        self._optimize_with(self._settings.sft_warm_up)
        self._backend.begin(2)
        for batch in received:
            # The noise depends only on the seed, the step and the shard.
            generator = np.random.Generator(np.random.Philox(key=[self.step.seed, (batch.step << 20) | batch.shard]))
            self._add_imitated(batch.shard, self._imitated_rows(batch.fields, batch.actions, generator))
            if batch.shard == self._backend.shards[-1]:
                loss, _ = self._end_imitation()
                if self.rank == 0:
                    self.record("sft_warm_up/loss", loss)
                self._backend.begin(2)

    def _imitated_rows(
        self, fields: Mapping[str, Tensor], actions: Tensor, generator: np.random.Generator
    ) -> ImitatedRows:
        """Rows on the device, with noise that the generator draws."""
        size = self._backend.on_model(lambda policy: policy.noise_size)
        noise = generator.standard_normal((len(actions), size))
        return ImitatedRows(
            fields={name: values.to(self.device) for name, values in fields.items()},
            actions=actions.to(self.device),
            noise=torch.from_numpy(noise).float().to(self.device),
        )

    def _add_imitated(self, shard: int, rows: ImitatedRows) -> None:
        """Forward, loss and backward of a shard's rows, in micro-batches; `_backend.begin(2)` comes first."""
        size = len(rows.actions)
        for few in torch.arange(size).split(self._settings.micro_batch_size or size):
            self._backend.backward(shard, rows[few], _imitation_loss)

    def _end_imitation(self) -> tuple[float, float]:
        """Takes the optimizer step; returns the mean loss and the norm of the gradient."""
        count, loss = self._backend.finish_backward()
        grad_norm = self._step(count)
        return loss / count, grad_norm

    def _absorb(self, sums_of: Callable[[Policy], Sequence[Tensor]]) -> None:
        """Merges the observation sums of all shards, on all replicas, into the policy's statistics."""
        sums = self._backend.on_model(sums_of)
        total = self._backend.sum_over_shards(torch.stack(list(sums))).to(self.device)
        self._backend.on_model(lambda policy: policy.absorb(total))


def _sums_of_shown(policy: Policy, batches: Sequence[DemonstratedBatch], shards: Sequence[int]) -> list[Tensor]:
    """Sums of observations, one per shard."""
    sums = [[policy.observation_sums(b.fields) for b in batches if b.shard == shard] for shard in shards]
    return [torch.stack(of_shard).sum(0) for of_shard in sums]


def _imitation_loss(answers: ModelOutputs) -> tuple[Tensor, list[float]]:
    loss = -answers.logprobs.sum()
    return loss, [float(len(answers.logprobs)), float(loss.detach())]

"""Objectives of pairs of answers to one prompt (rlinf_algos.preferences): DPO and IPO, and that of reward models.

A pair is batched as a group of two completions, so the prompt is computed once for both (models/packed.py,
models/sequences.py). The reference's log-probabilities come with the pairs, so no second model is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlinf_algos import PreferenceLoss, bradley_terry_loss, dpo_loss
from rlinf_comm import record
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.sequences import pack_groups
from rlinf_workers.models.trainable import CompletionBatch
from rlinf_workers.roles.language.micro_batches import num_tokens_of
from rlinf_workers.roles.language.objectives import Forward
from rlinf_workers.roles.records.language import Preference
from rlinf_workers.trainers.base import ModelOutputs


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class DpoSettings:
    """Arguments of `rlinf_algos.dpo_loss`."""

    beta: float
    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: float = 0.0


class PairObjective:
    """The mean of a loss over the pairs of an optimizer step. A subclass defines the loss of a pair, and the reward of
    an answer.

    Args:
        packs: compute pairs in one row without padding.
    """

    num_sums = 5
    loss_name: str

    def __init__(self, *, packs: bool) -> None:
        self._packs = packs

    def pair_losses(self, items: Sequence[Preference], batch: CompletionBatch, outputs: ModelOutputs) -> PreferenceLoss:
        """The losses and rewards of the pairs of a batch."""
        raise NotImplementedError

    def num_tokens(self, item: Preference) -> int:
        return num_tokens_of(item.group())

    def batch(self, items: Sequence[Preference], shard: int) -> CompletionBatch:
        groups = [item.group() for item in items]
        return pack_without_padding(groups) if self._packs else pack_groups(groups)

    def loss(
        self, items: Sequence[Preference], batch: CompletionBatch, outputs: ModelOutputs
    ) -> tuple[Tensor, list[float]]:
        result = self.pair_losses(items, batch, outputs)
        loss = result.loss_terms.sum()
        chosen, rejected = result.chosen_rewards.double(), result.rejected_rewards.double()
        is_right = (chosen > rejected).double()
        return loss, [len(items), float(loss.detach()), *(float(one.sum()) for one in (chosen, rejected, is_right))]

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        count, loss, chosen, rejected, is_right = sums
        return {
            self.loss_name: loss / count,
            "rewards/chosen": chosen / count,
            "rewards/rejected": rejected / count,
            "rewards/margin": (chosen - rejected) / count,
            "rewards/accuracy": is_right / count,
        }

    def measure(self, items: Sequence[Preference], batch: CompletionBatch, forward: Forward) -> Tensor:
        """The loss, the rewards of both answers, and 1 where the preferred one has the larger."""
        result = self.pair_losses(items, batch, forward(batch))
        chosen, rejected = result.chosen_rewards.double(), result.rejected_rewards.double()
        return torch.stack([result.loss_terms.double(), chosen, rejected, (chosen > rejected).double()], 1)


class Preferences(PairObjective):
    """DPO or IPO."""

    loss_name = "dpo/loss"

    def __init__(self, settings: DpoSettings, *, packs: bool) -> None:
        super().__init__(packs=packs)
        self._settings = settings

    def pair_losses(self, items: Sequence[Preference], batch: CompletionBatch, outputs: ModelOutputs) -> PreferenceLoss:
        references = [item.ref_logprobs for item in items if item.ref_logprobs is not None]
        assert len(references) == len(items), "the job asks the reference before it trains or evaluates"
        return dpo_loss(
            _sums(batch, outputs),
            torch.stack(references),
            beta=self._settings.beta,
            kind=self._settings.kind,
            label_smoothing=self._settings.label_smoothing,
            num_tokens=batch.loss_mask.sum(-1).view(-1, 2),
        )

    @staticmethod
    def sequence_logprobs(items: Sequence[Preference], batch: CompletionBatch, forward: Forward) -> Tensor:
        """[len(items), 2], the log-probability of each answer."""
        return _sums(batch, forward(batch))


class BradleyTerry(PairObjective):
    """The loss of a reward model. The last token of an answer stands for its end (models/scorer.py)."""

    loss_name = "reward_model/loss"

    def pair_losses(self, items: Sequence[Preference], batch: CompletionBatch, outputs: ModelOutputs) -> PreferenceLoss:
        last = batch.loss_mask.sum(-1, keepdim=True).long() - 1
        scores = outputs.values.gather(1, last).view(-1, 2)
        chosen, rejected = scores.detach().unbind(1)
        return PreferenceLoss(loss_terms=bradley_terry_loss(scores), chosen_rewards=chosen, rejected_rewards=rejected)


def _sums(batch: CompletionBatch, outputs: ModelOutputs) -> Tensor:
    """[N, 2] float64, log-probabilities of whole answers, of which a batch has the two of a pair one after the other.
    Sums of hundreds of nats would lose in float32 what the differences of two policies are made of."""
    return (outputs.logprobs.double() * batch.loss_mask).sum(-1).view(-1, 2)

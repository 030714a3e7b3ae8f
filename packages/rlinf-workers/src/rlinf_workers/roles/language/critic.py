"""Critic: a model like the actor's whose head predicts one number per token, the expected remaining reward.

It lives in the actor's processes and trains on the actor's shards (docs/decisions/011), so it needs no stage of its own
and the groups are not sent twice; like the actor's numbers, its numbers do not depend on the plan.
"""

from __future__ import annotations

from torch import Tensor

from rlinf_algos import Algorithm
from rlinf_workers.algorithm_parts import value_loss
from rlinf_workers.models.trainable import CompletionBatch
from rlinf_workers.roles.language.micro_batches import Tokens
from rlinf_workers.trainers.base import ModelOutputs, TrainingBackend
from rlinf_workers.trainers.statistics import totals_of

NUM_STATISTICS = 5


class Critic:
    """The value loss and its statistics.

    Args:
        backend: holds a model whose outputs have values.
    """

    def __init__(self, algorithm: Algorithm, backend: TrainingBackend) -> None:
        self._algorithm = algorithm
        self.backend = backend

    def start_from(self, policy: TrainingBackend) -> None:
        """Before its first step: copies what the policy has learned so far (an SFT warm-up), except the head."""
        if self.backend.num_steps == 0:
            self.backend.start_from(policy)

    def values(self, batch: CompletionBatch) -> Tensor:
        """[B, T] float32, the value before each token is sampled."""
        return self.backend.forward(batch).values

    def begin(self) -> None:
        """Starts an update."""
        self.backend.begin(NUM_STATISTICS)

    def backward(self, shard: int, batch: Tokens) -> None:
        """Adds the gradient of a micro-batch."""
        self.backend.backward(shard, batch.sequences, lambda answers: self._loss(answers, batch))

    def _loss(self, answers: ModelOutputs, batch: Tokens) -> tuple[Tensor, Tensor]:
        values, old, returns, mask = answers.values, batch.values, batch.returns, batch.sequences.loss_mask
        assert old is not None and returns is not None, "with a critic, groups have values and returns"
        loss = value_loss(self._algorithm, values, old, returns, mask)
        total, targets = loss.loss_terms.sum(), (returns * mask).double()
        squared_errors = ((returns - old) * mask).double().square().sum()
        sums = (mask.sum(), total, squared_errors, targets.sum(), targets.square().sum())
        return total, totals_of(sums, mask)

    def step(self) -> dict[str, float]:
        """Takes one optimizer step on the mean over tokens; returns its metrics."""
        tokens, loss, squared_errors, returns, squared_returns = self.backend.finish_backward()
        count = max(tokens, 1.0)
        grad_norm = self.backend.step(count)
        spread = squared_returns - returns * returns / count
        recorded = {"critic/loss": loss / count, "critic/grad_norm": grad_norm, "critic/return": returns / count}
        if spread > 1e-9 * squared_returns:  # equal returns leave only rounding errors
            recorded["critic/explained"] = 1.0 - squared_errors / spread
        return recorded

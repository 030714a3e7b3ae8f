"""What supervised training of a language model minimizes, as `SupervisedTrainer` calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf_workers.models.packed import PackedBatch, pack_examples
from rlinf_workers.models.trainable import Likeliest
from rlinf_workers.roles.records.language import Example, ExampleBatch
from rlinf_workers.trainers.base import ModelOutputs

T = TypeVar("T", contravariant=True)
Forward = Callable[[Any], ModelOutputs]
"""A batch on the device -> model outputs without gradients."""


class Objective(Protocol[T]):
    """A loss of items that are fed by the driver, and what is recorded of it."""

    num_sums: int
    """Sums that `loss` returns; the first is the divisor of the gradient."""

    def num_tokens(self, item: T) -> int:
        """Tokens that the model computes for an item in a packed row."""
        ...

    def batch(self, items: Sequence[T], shard: int) -> Any:
        """One model batch; it has `to(device)`."""
        ...

    def loss(self, items: Sequence[T], batch: Any, outputs: ModelOutputs) -> tuple[Tensor, Sequence[float]]:
        """The summed loss of a batch, and its sums."""
        ...

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """The metrics of an optimizer step, by the sums over all of its items."""
        ...

    def measure(self, items: Sequence[T], batch: Any, forward: Forward) -> Tensor:
        """[len(items), K] float64, what an evaluation needs of each item."""
        ...


class Imitation:
    """The negative log-likelihood of the tokens with a loss: supervised fine-tuning. The gradient is that of the mean
    over all these tokens of an optimizer step, whatever micro-batches and shards they are in.

    Args:
        packs: compute examples in one row without padding.
        tells_likeliest: the backend says which tokens are the most likely ones.
    """

    num_sums = 2

    def __init__(self, *, packs: bool, tells_likeliest: bool) -> None:
        self._packs, self._tells_likeliest = packs, tells_likeliest

    def num_tokens(self, item: Example) -> int:
        return len(item.token_ids) - 1

    def batch(self, items: Sequence[Example], shard: int) -> PackedBatch | ExampleBatch:
        if self._packs:
            return pack_examples(items)
        return ExampleBatch(
            shard=shard,
            token_ids=pad_sequence([item.token_ids for item in items], batch_first=True),
            loss_mask=pad_sequence([item.loss_mask for item in items], batch_first=True),
            pictures=tuple(item.pictures for item in items) if any(item.pictures for item in items) else (),
        )

    def loss(
        self, items: Sequence[Example], batch: PackedBatch | ExampleBatch, outputs: ModelOutputs
    ) -> tuple[Tensor, list[float]]:
        mask = _mask_of(batch)
        loss = -(outputs.logprobs * mask).sum()
        return loss, [float(mask.sum()), float(loss.detach())]

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        num_tokens, loss = sums
        return {"sft/loss": loss / num_tokens, "sft/trained_tokens": num_tokens}

    def measure(self, items: Sequence[Example], batch: PackedBatch | ExampleBatch, forward: Forward) -> Tensor:
        """Tokens with a loss, their summed loss, and, where the backend says so, how many are the most likely ones."""
        mask = _mask_of(batch)
        outputs = forward(Likeliest(batch)) if self._tells_likeliest else forward(batch)
        columns = [mask, -outputs.logprobs * mask]
        if self._tells_likeliest:
            columns.append(outputs.is_likeliest * mask)
        return torch.stack([column.double().sum(-1) for column in columns], 1)


def _mask_of(batch: PackedBatch | ExampleBatch) -> Tensor:
    """[B, T], of the tokens that the model's outputs are about."""
    return batch.loss_mask if isinstance(batch, PackedBatch) else batch.loss_mask[:, 1:]

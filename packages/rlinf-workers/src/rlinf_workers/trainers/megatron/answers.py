"""Model outputs of megatron-core: log-probabilities, entropies or values of the tokens of a query.

Legend: R rows, S positions of a row, T query tokens, V vocabulary size; a rank has V / tp of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rlinf_algos import LEAST_LOGPROB
from rlinf_sched.derive import CPU_CHUNK_BYTES, GPU_CHUNK_BYTES, MAX_LOGITS_BYTES
from rlinf_workers.trainers.megatron.queries import Query


def answers_of_states(states: Tensor, weight: Tensor, request: Query, first: int, num_words: int, group: Any) -> Tensor:
    """Log-probabilities and entropies, [2, R, T] float32, the same on all ranks of the group.

    Args:
        states: [R, S, H], whole on each rank of the group.
        weight: [rows of this rank, H], the head; may have padding rows beyond the vocabulary.
        first: token id of its first row.
        num_words: V
        group: ranks that share the vocabulary.
    """
    flat_states, targets = _before(states, request).flatten(0, 1), request.targets.flatten()

    def answer(states: Tensor, targets: Tensor) -> Tensor:
        logits = linear(states, weight)
        settings = request.temperature, first, num_words, group, request.entropies
        return _Answers.apply(logits, targets, *settings)  # pyright: ignore[reportReturnType]

    at_once = max(1, MAX_LOGITS_BYTES // (4 * len(weight)))
    if len(targets) <= at_once:
        answers = answer(flat_states, targets)
    else:  # a limited number of tokens' logits at a time, recomputed in the backward pass
        parts = zip(flat_states.split(at_once), targets.split(at_once), strict=True)
        answers = torch.cat([checkpoint(answer, *part, use_reentrant=False) for part in parts], 1)  # pyright: ignore
    return answers.view(2, *request.targets.shape)


def values_of_states(states: Tensor, head: nn.Linear, request: Query) -> Tensor:
    """Value before each token, the expected remaining reward, [1, R, T] float32.

    Args:
        states: [R, S, H], whole on each rank of the group.
        head: one row, not sharded.
    """
    return linear(_before(states, request).float(), head.weight.float(), head.bias.float()).permute(2, 0, 1)


def _before(states: Tensor, request: Query) -> Tensor:
    """The states [R, T, H] from which the query tokens are predicted."""
    return states.gather(1, request.before[..., None].expand(-1, -1, states.shape[-1]))


class _Answers(torch.autograd.Function):
    """Log-probabilities and entropies of a softmax whose logits are sharded over the ranks of a group.

    With p = softmax(z), L = log p and H = -sum p L: dL_t/dz = [z is z_t] - p, dH/dz = -p (L + H). Like
    `rlinf_algos.logprobs`, it keeps one copy of the logits, in their own dtype, and both passes process them in chunks
    of rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        first: int,
        num_words: int,
        group: Any,
        has_entropies: bool,
    ) -> Tensor:
        """logits [N, rows of this rank], targets [N] -> [2, N]. `has_entropies`: entropies may have a gradient."""
        num_here = max(0, num_words - first)  # later rows are padding
        ctx.scaled = partial(_scaled, temperature=temperature, num_words=num_here)
        largest, total, weighted = logits.new_empty(3, len(logits), dtype=torch.float32)
        for rows in _chunks(logits):
            largest[rows] = ctx.scaled(logits[rows]).max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        for rows in _chunks(logits):
            shifted = ctx.scaled(logits[rows]) - largest[rows, None]
            weights = shifted.exp()
            total[rows] = weights.sum(-1)
            weighted[rows] = weights.mul_(shifted.clamp_(min=LEAST_LOGPROB)).sum(-1)
        is_mine = (targets >= first) & (targets < first + logits.shape[1])
        places = (targets - first).clamp(0, logits.shape[1] - 1)
        target = ctx.scaled(logits.gather(1, places[:, None]), num_words=1)[:, 0] - largest
        total, target, weighted = sums = torch.stack([total, target.masked_fill(~is_mine, 0.0), weighted])
        dist.all_reduce(sums, group=group)
        entropy = total.log() - weighted / total
        ctx.temperature, ctx.has_entropies = temperature, has_entropies
        ctx.save_for_backward(logits, largest + total.log(), entropy, places, is_mine)
        return torch.stack([target - total.log(), entropy])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ((of_logprobs, of_entropies),) = (gradient / ctx.temperature for gradient in gradients)
        logits, normaliser, entropy, places, is_mine = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            logprobs = ctx.scaled(logits[rows]) - normaliser[rows, None]
            of_rows = logprobs.exp()
            if ctx.has_entropies:
                weights = logprobs.clamp_(min=LEAST_LOGPROB).add_(entropy[rows, None]).mul_(of_entropies[rows, None])
                of_rows *= weights.add_(of_logprobs[rows, None])
            else:
                of_rows *= of_logprobs[rows, None]
            of_rows.neg_().scatter_add_(1, places[rows, None], (of_logprobs * is_mine)[rows, None])
            of_logits[rows] = of_rows
        return of_logits, None, None, None, None, None, None


def _scaled(logits: Tensor, *, temperature: float, num_words: int) -> Tensor:
    """Float32, -inf from column `num_words` on."""
    scaled = logits.float() / temperature
    scaled[:, num_words:] = float("-inf")
    return scaled


def _chunks(logits: Tensor) -> Iterator[slice]:
    """The chunks of rows to process at once."""
    size = max(1, (GPU_CHUNK_BYTES if logits.is_cuda else CPU_CHUNK_BYTES) // (4 * logits.shape[1]))
    return (slice(start, start + size) for start in range(0, len(logits), size))

"""REINFORCE++ (arXiv:2501.03262): rewards to go for each token, whitened over the whole batch, no critic.

Without a group, the batch is the baseline; the "baseline" form takes the mean of the group off first. Legend: B
sequences, T tokens.
"""

import torch
from torch import Tensor

from rlinf_algos.advantages.groups import dr_grpo_advantages
from rlinf_algos.checks import as_mask, check_finite, check_range, check_shape, masked
from rlinf_algos.errors import ShapeError
from rlinf_algos.normalization import SumOverRanks, normalize_advantages
from rlinf_algos.recurrence import backward_recurrence


@torch.no_grad()
def rewards_to_go(rewards: Tensor, mask: Tensor | None, gamma: float, *, dim: int = 1) -> Tensor:
    """`R[t] = rewards[t] + gamma * R[t + 1]`, over the positions inside the mask only, as if the others were not there.

    Args:
        rewards: any shape.
        mask: the same shape, bool or 0/1; None: every element.
        gamma: discount for each position inside the mask, in [0, 1].
        dim: which dimension is time: 1 for [B, T] tokens, 0 for [T, N] steps.

    Returns:
        the shape of rewards, at least float32, 0 outside the mask.

    Raises:
        ShapeError, NonFiniteError. AlgosError: gamma out of range.
    """
    check_range("gamma", gamma, low=0.0, high=1.0, why="it is a discount")
    if not -rewards.ndim <= dim < rewards.ndim:
        raise ShapeError(f"rewards has shape {list(rewards.shape)}, which has no dimension {dim}")
    inside = as_mask("mask", mask, "rewards", rewards)
    terms = masked("rewards", rewards, inside)
    decay = torch.full_like(terms, gamma).masked_fill(~inside, 1.0)
    return backward_recurrence(terms, decay, dim).masked_fill(~inside, 0.0)


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float = 1.0,
    epsilon: float = 1e-8,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """Discounted rewards to go of each token, whitened over all tokens of the batch.

    `A[b, t] = (R[b, t] - mean) / (std + epsilon)` with `R[b, t] = sum over k >= t of gamma^(k - t) rewards[b, k]`.

    Args:
        rewards: [B, T]: the KL penalty of each token and the score at the last one (`kl_shaped_rewards`).
        loss_mask: [B, T], bool or 0/1; positions outside are skipped (verl starts anew after a gap).
        gamma: discount, in [0, 1]; the paper: 1.
        epsilon: added to the standard deviation.
        sum_over_ranks: whitens over all ranks' tokens, see `normalize_advantages`; None: this rank's.

    Returns:
        [B, T], at least float32, 0 outside the mask. All 0 where every token has the same reward to go.

    Raises:
        ShapeError: shapes differ or are not [B, T]. NonFiniteError: a reward inside the mask. AlgosError: gamma.
    """
    if rewards.ndim != 2:
        raise ShapeError(f"rewards has shape {list(rewards.shape)}; expected [B, T], one reward for each token")
    returns = rewards_to_go(rewards, loss_mask, gamma)
    return normalize_advantages(returns, loss_mask, epsilon=epsilon, sum_over_ranks=sum_over_ranks)


def reinforce_plus_plus_baseline_advantages(
    scores: Tensor,
    group_ids: Tensor,
    loss_mask: Tensor,
    *,
    epsilon: float = 1e-8,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """Score less the mean of its group, the same for all tokens of a completion, whitened over all tokens of the batch.

    The deviation is the batch's, not the group's as in GRPO: prompts of little spread are not blown up. The KL penalty
    belongs into the loss here (the paper: k2). A group of equal scores brings 0 before the whitening; after it, what is
    left of the batch's mean, as in verl and OpenRLHF.

    Args:
        scores: [B].
        group_ids: [B] integers; equal ones are completions of one prompt.
        loss_mask: [B, T], bool or 0/1. A completion without a token inside is no part of its group.
        epsilon, sum_over_ranks: as for `reinforce_plus_plus_advantages`. Groups must be whole on a rank.

    Returns:
        [B, T], at least float32, 0 outside the mask.

    Raises:
        ShapeError: shapes do not fit. NonFiniteError: the score of a completion with tokens.
    """
    if loss_mask.ndim != 2:
        raise ShapeError(f"loss_mask has shape {list(loss_mask.shape)}; expected [B, T]")
    check_shape("scores", scores, loss_mask.shape[:1], "loss_mask[:, 0]")
    inside = as_mask("loss_mask", loss_mask, "loss_mask", loss_mask)
    check_finite("scores", scores, inside.any(dim=1))
    centred = dr_grpo_advantages(scores, group_ids, inside.any(dim=1))
    return normalize_advantages(
        centred[:, None].expand(loss_mask.shape), inside, epsilon=epsilon, sum_over_ranks=sum_over_ranks
    )

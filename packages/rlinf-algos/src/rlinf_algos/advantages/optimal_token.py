"""The optimal token baseline (OTB, arXiv:2602.07078): a baseline per token position, from the group of the completion.

The variance of a policy gradient is minimal if the rewards to go are compared with their mean weighted by the squared
norm of the gradient up to there. The paper replaces that norm by one that a forward pass can compute, the norm of the
gradient with respect to the logits: `|d log p / d logits|^2 = 1 - 2 p + sum of p^2 over the vocabulary`. With R the
rewards to go and W the cumulative sum of these norms,

    A[i, t] = R[i, t] - sum over j of W[j, t] R[j, t] / sum over j of W[j, t]

over the completions j of the group that have a t-th token. Beyond the second longest completion there is nothing to
compare with, and the baseline is 0.

Positions count tokens inside the mask, so tool output between them is skipped: this is verl's
`tir_optimal_token_baseline`, and its `optimal_token_baseline` if completions have no gaps. Departs from it if a group's
rewards do not differ, including a lone completion: advantages are then exactly 0.
"""

import torch
from torch import Tensor

from rlinf_algos.advantages.returns import rewards_to_go
from rlinf_algos.checks import as_mask, check_shape, masked
from rlinf_algos.errors import AlgosError, ShapeError


@torch.no_grad()
def optimal_token_advantages(rewards: Tensor, loss_mask: Tensor, logit_norms: Tensor) -> Tensor:
    """Rewards to go of each token less the optimal baseline of its place; G completions of one prompt.

    Args:
        rewards: [G, T], usually 0 but at the last token.
        loss_mask: [G, T], bool or 0/1.
        logit_norms: [G, T], `1 - 2 p + sum p^2` of each token's distribution (`logit_norms`), at least 0.

    Returns:
        [G, T], at least float32, 0 outside the mask.

    Raises: ShapeError, NonFiniteError. AlgosError: a negative norm.
    """
    if rewards.ndim != 2:
        raise ShapeError(f"rewards has shape {list(rewards.shape)}; expected [G, T]")
    check_shape("logit_norms", logit_norms, rewards.shape, "rewards")
    mask = as_mask("loss_mask", loss_mask, "rewards", rewards)
    returns = rewards_to_go(rewards, mask, 1.0)
    norms = masked("logit_norms", logit_norms, mask).double()
    if norms.numel() and float(norms.min()) < 0.0:
        raise AlgosError(f"logit_norms holds {float(norms.min()):g}; a squared norm is at least 0")
    place = (~mask).to(torch.int8).argsort(dim=1, stable=True)  # tokens inside the mask first, in their order
    inside = mask.gather(1, place)
    to_go = returns.gather(1, place).double()
    weights = norms.gather(1, place).cumsum(dim=1).masked_fill(~inside, 0.0)
    total = weights.sum(dim=0).clamp(min=torch.finfo(weights.dtype).tiny)
    has_others = inside.sum(dim=0) > 1
    baseline = ((weights * to_go).sum(dim=0) / total).masked_fill(~has_others, 0.0)
    first = to_go[:, 0][inside[:, 0]] if to_go.shape[1] else to_go.new_zeros(0)
    differs = len(first) > 1 and bool((first != first[0]).any())
    advantages = (to_go - baseline).masked_fill(~inside, 0.0) * differs
    return torch.zeros_like(returns).scatter_(1, place, advantages.to(returns.dtype))

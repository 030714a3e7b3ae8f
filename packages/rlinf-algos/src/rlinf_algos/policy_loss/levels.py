"""The level of a probability ratio: a token, an action, or a chunk of actions.

A vision-language-action model outputs chunks of C actions, each of A tokens (or dimensions of a normal distribution).
The ratio of a whole chunk is the product of the ratios of its tokens, the probability ratio of the policy; ratios of
tokens are clipped one by one. RLinf calls this `logprob_type` and `reward_type` (`token_level`, `action_level`,
`chunk_level`).

Legend: ... any leading dimensions (T time steps, N environments), C actions in a chunk, A tokens in an action.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_shape, masked
from rlinf_algos.errors import AlgosError, ShapeError

Level = Literal["token", "action", "chunk"]

_NUM_SUMMED = {"token": 0, "action": 1, "chunk": 2}
"""Level -> number of trailing dimensions that become one element."""


class PolicyInputs(NamedTuple):
    """The arguments of a policy loss, in their order: `ppo_clip_loss(*inputs)`."""

    policy_logprobs: Tensor
    proximal_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor


def logprobs_at_level(level: Level, logprobs: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Log-probabilities of the elements of a level: the sums over the tokens inside the mask.

    Args:
        logprobs: [..., C, A], nats; may carry gradient.
        loss_mask: [...], [..., C] or [..., C, A], bool or 0/1; 0 excludes what an episode that ended within a chunk cut
            off. None: every token counts.

    Returns:
        nats, [..., C, A], [..., C] or [...], at least float32; 0 for an element without a token.

    Raises:
        ShapeError: fewer than two dimensions, or a mask of another shape. NonFiniteError: inside the mask.
        AlgosError: no such level.
    """
    num_summed = _checked_level(level, "logprobs", logprobs)
    filled = masked("logprobs", logprobs, _fine_mask(logprobs, loss_mask))
    return filled.sum(dim=tuple(range(-num_summed, 0))) if num_summed else filled


def at_level(
    level: Level,
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None = None,
) -> PolicyInputs:
    """The inputs of a policy loss with one element for each token, action or chunk.

    Args:
        policy_logprobs: [..., C, A], nats, with gradient.
        proximal_logprobs: the same shape.
        advantages: [...] of chunks, [..., C] of actions, or [..., C, A]; not finer than the level. Coarser ones are
            repeated: each action or token of a chunk gets the chunk's advantage.
        loss_mask: as for `logprobs_at_level`.

    Returns:
        `PolicyInputs`, all of the level's shape; an element is in the mask if any of its tokens is.

    Raises:
        ShapeError: as `logprobs_at_level`, and for advantages that are finer than the level (a chunk has one advantage;
            sum its rewards before) or of another shape.

    Example: `ppo_clip_loss(*at_level("chunk", policy, proximal, advantages))`, [T, N, 8, 7] and [T, N] -> [T, N] terms.
    """
    num_summed = _checked_level(level, "policy_logprobs", policy_logprobs)
    check_shape("proximal_logprobs", proximal_logprobs, policy_logprobs.shape, "policy_logprobs")
    fine_mask = _fine_mask(policy_logprobs, loss_mask)
    shape = policy_logprobs.shape[: policy_logprobs.ndim - num_summed]
    if advantages.ndim > len(shape):
        raise ShapeError(
            f"advantages has shape {list(advantages.shape)}, finer than {list(shape)}, that of level={level!r}; "
            "sum the rewards to the level before computing advantages"
        )
    mask = fine_mask.flatten(len(shape)).any(dim=-1) if num_summed else fine_mask
    return PolicyInputs(
        logprobs_at_level(level, policy_logprobs, fine_mask),
        logprobs_at_level(level, proximal_logprobs, fine_mask),
        _repeated("advantages", advantages, shape, num_least=policy_logprobs.ndim - 2),
        mask,
    )


def _checked_level(level: str, name: str, logprobs: Tensor) -> int:
    if level not in _NUM_SUMMED:
        raise AlgosError(f"level={level!r} is not known; use one of {', '.join(map(repr, _NUM_SUMMED))}")
    if logprobs.ndim < 2:
        raise ShapeError(
            f"{name} has shape {list(logprobs.shape)}; expected [..., C, A], actions and their tokens last"
        )
    return _NUM_SUMMED[level]


def _fine_mask(logprobs: Tensor, loss_mask: Tensor | None) -> Tensor:
    """[..., C, A] bool"""
    if loss_mask is not None:
        loss_mask = _repeated("loss_mask", loss_mask, logprobs.shape, num_least=logprobs.ndim - 2)
    return as_mask("loss_mask", loss_mask, "logprobs", logprobs)


def _repeated(name: str, tensor: Tensor, shape: torch.Size, num_least: int) -> Tensor:
    """Repeated along the trailing dimensions that it lacks."""
    if tensor.ndim < num_least or tensor.shape != shape[: tensor.ndim]:
        raise ShapeError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)} or a coarser level of it")
    return tensor.reshape((*tensor.shape, *[1] * (len(shape) - tensor.ndim))).expand(shape)

"""Generalised advantage estimation (arXiv:1506.02438, eq. 16), for steps of environments and for tokens.

Legend: T time steps or tokens, N environments, B sequences. Nothing here carries gradients: advantages and returns are
constants of the loss.

Departures: termination and truncation of environments are treated separately (arXiv:1712.00378).
"""

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, at_least_float32, check_finite, check_range, check_shape, masked
from rlinf_algos.errors import ShapeError
from rlinf_algos.recurrence import backward_recurrence


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    *,
    bootstrap_at_termination: bool = False,
    bootstrap_at_truncation: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over a window of T steps of N environments that reset themselves.

        delta[t] = rewards[t] + gamma * bootstrap[t] * next_values[t] - values[t]
        A[t] = delta[t] + gamma * lam * continues[t] * A[t + 1],  A[T] = 0,  returns = A + values

    `continues` is 0 where an episode ended (terminated or truncated): the next row is another episode. `bootstrap` is 0
    where it terminated. Truncation only cuts the trace: the episode would have gone on, so its last state keeps its
    value.

    Args:
        rewards: [T, N].
        values: [T, N], V of the observation that step t acted on.
        next_values: [T, N], V of the true successor: at the end of an episode the *final* observation, not the first
            one of the next episode that the environment shows after its auto-reset.
        terminated: [T, N], bool or 0/1; wins where truncated is set too.
        truncated: [T, N], bool or 0/1.
        gamma: discount, in [0, 1].
        lam: trace decay, in [0, 1].
        bootstrap_at_termination: True keeps `gamma * next_values` at termination as well. Not the textbook, but right
            where termination means success and the reward is dense: otherwise finishing forfeits all reward to come,
            and the policy learns to hover at the goal (ManiSkill's PPO baseline bootstraps there too).
        bootstrap_at_truncation: False counts a truncated episode as ended with value 0, for tasks whose time limit is
            part of the task: a policy that did not succeed in time has failed. The value must then be able to tell the
            remaining time, or it predicts a mean over it.

    Returns:
        advantages and returns, [T, N], at least float32.

    Raises:
        ShapeError: shapes differ or are not [T, N]. NonFiniteError: in rewards, values, or a next value that is used.
    """
    if rewards.ndim != 2:
        raise ShapeError(f"rewards has shape {list(rewards.shape)}; expected [T, N], time first")
    for name, tensor in (("values", values), ("next_values", next_values)):
        check_shape(name, tensor, rewards.shape, "rewards")
    check_range("gamma", gamma, low=0.0, high=1.0, why="it is a discount")
    check_range("lam", lam, low=0.0, high=1.0, why="it is a trace decay")
    terminated = as_mask("terminated", terminated, "rewards", rewards)
    truncated = as_mask("truncated", truncated, "rewards", rewards)
    check_finite("rewards", rewards)
    check_finite("values", values)
    no_bootstrap = torch.zeros_like(terminated) if bootstrap_at_termination else terminated
    bootstraps = ~(no_bootstrap if bootstrap_at_truncation else no_bootstrap | (truncated & ~terminated))
    values = at_least_float32(values)
    deltas = at_least_float32(rewards) + gamma * masked("next_values", next_values, bootstraps) - values
    decay = gamma * lam * (~(terminated | truncated)).to(deltas.dtype)
    advantages = backward_recurrence(deltas, decay, dim=0)
    return advantages, advantages + values


@torch.no_grad()
def token_gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """GAE over the tokens of completions, each an episode that terminates with its last token.

    Positions outside the mask are skipped, wherever they are: the token before a gap (a tool's output) bootstraps from
    the token after it, as in verl. A completion truncated at the length limit counts as ended, as is usual in the
    field.

    Args:
        rewards: [B, T], usually 0 but at the last token (and minus a KL penalty on each).
        values: [B, T], V before the token is chosen.
        loss_mask: [B, T], bool or 0/1.
        gamma: discount, in [0, 1]; usually 1.
        lam: trace decay, in [0, 1].

    Returns:
        advantages and returns, [B, T], at least float32, 0 outside the mask.

    Raises:
        ShapeError: shapes differ or are not [B, T]. NonFiniteError: in rewards or values inside the mask.
    """
    if rewards.ndim != 2:
        raise ShapeError(f"rewards has shape {list(rewards.shape)}; expected [B, T]")
    check_shape("values", values, rewards.shape, "rewards")
    check_range("gamma", gamma, low=0.0, high=1.0, why="it is a discount")
    check_range("lam", lam, low=0.0, high=1.0, why="it is a trace decay")
    mask = as_mask("loss_mask", loss_mask, "rewards", rewards)
    rewards, values = masked("rewards", rewards, mask), masked("values", values, mask)
    # V of the next token inside the mask, carried over gaps; 0 past the end
    at_next = torch.cat([values, values.new_zeros(len(values), 1)], dim=1)
    gaps = torch.cat([~mask, mask.new_zeros(len(mask), 1)], dim=1)
    next_values = backward_recurrence(at_next, gaps.to(at_next.dtype), dim=1)[:, 1:]
    deltas = (rewards + gamma * next_values - values).masked_fill(~mask, 0.0)
    decay = torch.full_like(deltas, gamma * lam).masked_fill(~mask, 1.0)
    advantages = backward_recurrence(deltas, decay, dim=1).masked_fill(~mask, 0.0)
    return advantages, advantages + values

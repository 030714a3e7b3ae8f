"""Advantages: GRPO (arXiv:2402.03300, section 4.1.2) and GAE (arXiv:1506.02438, eq. 16), for steps and for tokens.

Legend: P prompts, G completions of one prompt, T time steps, N environments, B sequences. Nothing here carries
gradients: advantages and returns are constants of the loss.

Departures: a GRPO group whose rewards are all equal (a single completion included) gets advantages of exactly 0, never
rounding noise divided by epsilon; GAE treats termination and truncation apart (arXiv:1712.00378).
"""

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, at_least_float32, check_finite, check_range, check_shape, masked
from rlinf_algos.errors import ShapeError


@torch.no_grad()
def grpo_advantages(rewards: Tensor, *, normalize_std: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Each reward against the other completions of its prompt.

    `A[p, g] = (rewards[p, g] - mean_g) / (std_g + epsilon)`, with the unbiased standard deviation (G - 1), as verl and
    TRL have it. A group without any difference in rewards gets exactly 0.

    Args:
        rewards: [P, G].
        normalize_std: False leaves out the division (Dr. GRPO, arXiv:2503.20783), which weighs prompts by difficulty.
        epsilon: keeps the division sane for nearly equal rewards; 1e-4 as in TRL (verl: 1e-6).

    Returns:
        [P, G], at least float32.

    Raises:
        ShapeError: rewards is not [P, G]. NonFiniteError: a reward is NaN or infinite.

    Example: [[1, 0, 0, 1]] -> [[0.866, -0.866, -0.866, 0.866]]; [[1, 1, 1, 1]] -> [[0, 0, 0, 0]].
    """
    if rewards.ndim != 2:
        raise ShapeError(f"rewards has shape {list(rewards.shape)}; expected [P, G], one row for each prompt")
    check_range("epsilon", epsilon, low=0.0, why="it is added to a standard deviation")
    check_finite("rewards", rewards)
    rewards = at_least_float32(rewards)
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    is_constant = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    if normalize_std:
        # correction=0 for a single completion only avoids a warning: that group is constant
        std = rewards.std(dim=1, keepdim=True, correction=min(1, rewards.shape[1] - 1))
        advantages = advantages / (std + epsilon)
    return advantages.masked_fill(is_constant, 0.0)


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
    bootstraps = torch.ones_like(terminated) if bootstrap_at_termination else ~terminated
    values = at_least_float32(values)
    deltas = at_least_float32(rewards) + gamma * masked("next_values", next_values, bootstraps) - values
    decay = gamma * lam * (~(terminated | truncated)).to(deltas.dtype)
    advantages = torch.empty_like(deltas)
    carry = torch.zeros_like(deltas[0]) if len(deltas) else deltas
    for t in range(len(deltas) - 1, -1, -1):
        carry = deltas[t] + decay[t] * carry
        advantages[t] = carry
    return advantages, advantages + values


@torch.no_grad()
def token_gae(rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE over the tokens of completions, each an episode that terminates with its last token.

    Positions outside the mask are skipped, wherever they are: the token before a gap (a tool's output) bootstraps from
    the token after it, as in verl. A completion cut at the length limit counts as ended, as is usual in the field.

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
    advantages = torch.zeros_like(rewards + values)
    next_values = carry = torch.zeros_like(advantages[:, 0]) if advantages.shape[1] else advantages
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        carry = torch.where(mask[:, t], delta + gamma * lam * carry, carry)
        next_values = torch.where(mask[:, t], values[:, t], next_values)
        advantages[:, t] = carry
    advantages = advantages.masked_fill(~mask, 0.0)
    return advantages, advantages + values

"""The steps of a segment as inputs of an advantage function: its chunks, or the actions in them.

An action that was not executed because its episode ended earlier in the chunk is a terminal step with reward 0, so that
nothing propagates through it.

Legend: T chunks, n environments, K actions of a chunk; S steps, T or T K.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rlinf_workers.roles.records.embodied import Trajectory


def was_executed(num_executed: Tensor, num_actions: int) -> Tensor:
    """[...] -> [..., K] bool."""
    return torch.arange(num_actions, device=num_executed.device) < num_executed[..., None]


def episode_weights(ended: Tensor, counts: Tensor) -> Tensor:
    """Weights of steps whose mean over all steps is the mean over rows of the mean over their episodes, each the mean
    over its steps (RLinf's research code, `masked_mean_ratio`, for one episode in each row).

    Args:
        ended: [T, n] bool, whether an episode ended with the step.
        counts: [T, n] bool, whether the step is trained.

    Returns: [T, n], 0 where a step does not count.

    Example: a row of 4 steps, of which only the 2 of its first episode count: [2, 2, 0, 0]
    """
    episode = ended.long().cumsum(0) - ended.long()
    lengths = torch.zeros(len(ended) + 1, *ended.shape[1:], device=ended.device).scatter_add(0, episode, counts.float())
    num_episodes = (lengths > 0).sum(0)
    return (len(ended) / (lengths.gather(0, episode) * num_episodes)).masked_fill(~counts, 0.0)


def chunk_steps(t: Trajectory) -> dict[str, Tensor]:
    """[T, n] each, by the names of `rlinf_algos.parts.INPUTS`; the rewards within a chunk are summed."""
    return {
        "rewards": t.rewards.sum(-1),
        "values": t.values,
        "next_values": t.next_values,
        "terminated": t.terminated,
        "truncated": t.truncated,
    }


def action_steps(t: Trajectory) -> dict[str, Tensor]:
    """[T K, n] each, like `chunk_steps`; without values if the policy has none per action. The successor of an action
    is the next one of its chunk; the successor of the last action of a chunk or episode is the true next state."""
    executed = was_executed(t.num_executed, t.rewards.shape[-1])
    is_last = executed & (executed.sum(-1, keepdim=True) == executed.cumsum(-1))
    steps = {
        "rewards": t.rewards,
        "terminated": (is_last & t.terminated[..., None]) | ~executed,
        "truncated": is_last & t.truncated[..., None],
    }
    if t.values.ndim == t.rewards.ndim:
        successor = t.next_values[..., None]
        following = torch.cat([t.values[..., 1:], successor], dim=-1)
        steps |= {"values": t.values, "next_values": torch.where(is_last, successor, following)}
    return {name: tensor.movedim(-1, 1).flatten(0, 1) for name, tensor in steps.items()}


def state_ids(t: Trajectory) -> Tensor:
    """[T, n] int64: equal if and only if the policy acted on bitwise equal observations (all fields together)."""
    num_steps, num_envs = t.rewards.shape[:2]
    fields = [t.fields[name].cpu().contiguous().flatten(0, 1) for name in sorted(t.fields)]
    by_digest: dict[bytes, int] = {}
    ids = []
    for row in range(num_steps * num_envs):
        digest = hashlib.blake2b(digest_size=16)
        for field in fields:
            digest.update(field[row].reshape(-1).view(torch.uint8).numpy().tobytes())
        ids.append(by_digest.setdefault(digest.digest(), len(by_digest)))
    return torch.tensor(ids).view(num_steps, num_envs)


def of_actions(steps: Tensor, num_actions: int) -> Tensor:
    """[T K, n] -> [T, n, K]."""
    return steps.unflatten(0, (-1, num_actions)).movedim(1, -1)

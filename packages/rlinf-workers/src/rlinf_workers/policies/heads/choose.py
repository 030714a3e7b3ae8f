"""Chooses the action head for an environment's actions."""

from __future__ import annotations

from rlinf_envs import ActionSpec
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.heads.base import ActionHead
from rlinf_workers.policies.heads.categories import CategoriesHead
from rlinf_workers.policies.heads.gaussian import GaussianHead

MAX_CHOICES = 4096
"""Maximum number of choices in one action dimension."""


def head_for(actions: ActionSpec, chunk_size: int, *, initial_log_std: float = -0.5) -> ActionHead:
    """A Gaussian for continuous actions, categories for discrete ones; K = chunk_size.

    Raises: PolicyError for more choices than MAX_CHOICES in one dimension.
    """
    if actions.kind == "continuous":
        return GaussianHead(chunk_size * actions.low.numel(), initial_log_std)
    choices = tuple((actions.high - actions.low + 1).flatten().tolist())
    if max(choices) > MAX_CHOICES:
        raise PolicyError(f"an action has {max(choices)} choices in one dimension; the maximum is {MAX_CHOICES}")
    return CategoriesHead(chunk_size * choices)

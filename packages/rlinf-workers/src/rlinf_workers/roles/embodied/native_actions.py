"""Actions in the numbering and shape of an environment, and in the policy's."""

from __future__ import annotations

from torch import Tensor

from rlinf_envs import ActionSpec


def native_actions(actions: Tensor, spec: ActionSpec) -> Tensor:
    """[n, K, A] in the policy's numbering, where discrete actions begin at 0 -> [n, K, *spec.shape] in the
    environment's, where they begin at `low`."""
    shaped = actions.reshape(*actions.shape[:2], *spec.shape)
    return shaped if spec.kind == "continuous" else shaped + spec.low


def policy_actions(actions: Tensor, spec: ActionSpec) -> Tensor:
    """The inverse of `native_actions`."""
    flat = actions.flatten(2) if actions.ndim > 2 else actions[..., None]
    return flat if spec.kind == "continuous" else flat - spec.low.flatten()

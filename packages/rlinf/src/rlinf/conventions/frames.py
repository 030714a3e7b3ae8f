"""Frames: moments of demonstrations, on which a policy is compared with what was demonstrated.

Legend: F frames, D demonstrations, A numbers of an action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf.errors import UserError
from rlinf_envs import ActionSpec, Demonstration
from rlinf_workers.roles import text_tensor

MIN_DEMONSTRATIONS = 5
"""The differences of fewer demonstrations prove nothing."""
NUM_FRAMES, MIN_FRAMES_EACH, MAX_FRAMES_EACH = 160, 5, 8
"""Frames in all, if there are enough demonstrations, and of a demonstration; neighbours show nearly the same."""
CLOSE_FRAMES_EACH = 20
"""Frames of a demonstration, where those above show a gain and do not prove it: a gripper moves in few of them."""
CONSTANT_SHARE = 1e-3
"""A number whose standard deviation is below this share of the environment's range is constant."""

TARGET_SHARE = 0.5
"""A number is a target for the state if its distance to the state varies by less than this share of itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionScale:
    """Statistics of every demonstrated action, [A] float32 each."""

    mean: Tensor
    std: Tensor
    low: Tensor
    """Minimum."""
    high: Tensor
    """Maximum."""
    q01: Tensor
    q99: Tensor
    varies: Tensor
    """bool: whether the number is not nearly constant."""

    @classmethod
    def of(cls, actions: Tensor, spec: ActionSpec) -> ActionScale:
        """Args: actions: [T, A]."""
        low, high = actions.amin(0), actions.amax(0)
        span = (spec.high - spec.low).flatten()
        span = torch.where(span.isfinite(), span, (high - low).clamp(min=1e-6))
        std = actions.std(0, correction=0)
        q01, q99 = actions.quantile(torch.tensor([0.01, 0.99]), dim=0)
        return cls(
            mean=actions.mean(0), std=std, low=low, high=high, q01=q01, q99=q99, varies=std > CONSTANT_SHARE * span
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedFrames:
    """F moments of D demonstrations."""

    fields: Mapping[str, Tensor]
    """Name -> [F, ...], as a policy reads them; texts as from `text_tensor`."""
    actions: Tensor
    """[F, A] float32, what was done."""
    trivial: Tensor
    """[F, A], the answer of a policy that has learned nothing: the mean action or, for numbers that are targets for the
    state, the state plus the mean difference."""
    unit: Tensor
    """[A], the standard deviation of demonstrated actions from that answer."""
    before: Tensor
    """[F, A], the action before it; at the beginning zeros."""
    elsewhere: Tensor
    """[F, A], the action of another demonstration at the same time."""
    demonstration: Tensor
    """[F] int64, from 0."""
    scale: ActionScale
    spec: ActionSpec

    @property
    def num_demonstrations(self) -> int:
        return int(self.demonstration.max()) + 1

    def executed(self, actions: Tensor) -> Tensor:
        """[F, A] -> what the environment executes: within its bounds."""
        return torch.minimum(torch.maximum(actions, self.spec.low.flatten()), self.spec.high.flatten())


def frames_of(
    demonstrations: Sequence[Demonstration], reads: Sequence[str], spec: ActionSpec, *, num_each: int | None = None
) -> ComparedFrames:
    """Picks frames evenly from every demonstration.

    Args:
        reads: fields to keep; "state" is kept in addition, if there is one.
        num_each: frames of a demonstration; None: `NUM_FRAMES` in all.

    Raises: UserError for too few demonstrations, discrete actions, and demonstrations that never move.
    """
    if spec.kind != "continuous":
        raise UserError("the environment takes discrete actions, and conventions are those of continuous ones")
    if len(demonstrations) < MIN_DEMONSTRATIONS:
        raise UserError(
            f"there are {len(demonstrations)} demonstrations; at least {MIN_DEMONSTRATIONS} are needed, since a "
            "difference counts only if it repeats in demonstration after demonstration"
        )
    flat = [flat_actions(one) for one in demonstrations]
    scale = ActionScale.of(torch.cat(flat), spec)
    if not scale.varies.any():
        raise UserError("all demonstrated actions are equal, so nothing can be compared")
    names = [name for name in dict.fromkeys((*reads, "state")) if name in demonstrations[0].observations]
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    actions, before, elsewhere, numbers = [], [], [], []
    origins = [origin(one, actions.shape[1]) for one, actions in zip(demonstrations, flat, strict=True)]
    trivial, unit = _trivial(flat, origins, scale)
    answers = []
    num_each = num_each or min(max(NUM_FRAMES // len(flat), MIN_FRAMES_EACH), MAX_FRAMES_EACH)
    for number, (demonstration, done) in enumerate(zip(demonstrations, flat, strict=True)):
        times = torch.linspace(0, len(done) - 1, min(num_each, len(done))).round().long()
        other = flat[(number + 1) % len(flat)]
        for name in names:
            rows[name].append(_at(demonstration, name, times))
        actions.append(done[times])
        answers.append(trivial[number][times])
        before.append(torch.where(times[:, None] > 0, done[(times - 1).clamp(min=0)], 0.0))
        elsewhere.append(other[times.clamp(max=len(other) - 1)])
        numbers.append(torch.full((len(times),), number))
    return ComparedFrames(
        fields={name: torch.cat(values) for name, values in rows.items()},
        actions=torch.cat(actions),
        trivial=torch.cat(answers),
        unit=unit,
        before=torch.cat(before),
        elsewhere=torch.cat(elsewhere),
        demonstration=torch.cat(numbers),
        scale=scale,
        spec=spec,
    )


def flat_actions(demonstration: Demonstration) -> Tensor:
    """[T, A] float32."""
    return demonstration.actions.reshape(len(demonstration.actions), -1).float()


def origin(demonstration: Demonstration, size: int) -> Tensor | None:
    """[T, A]: the state in place of all numbers but the last, which may be targets for it; None without such a
    state."""
    states = demonstration.observations.get("state")
    if not isinstance(states, Tensor) or states.ndim != 2 or states.shape[1] < size - 1:
        return None
    return torch.cat([states[:, : size - 1].float(), torch.zeros(len(states), 1)], dim=1)


def _trivial(
    actions: Sequence[Tensor], origins: Sequence[Tensor | None], scale: ActionScale
) -> tuple[list[Tensor], Tensor]:
    """`trivial` of every moment of the demonstrations, and `unit`."""
    means, unit = [scale.mean.expand_as(one) for one in actions], scale.std
    states = [one for one in origins if one is not None]
    if len(states) < len(origins):
        return means, unit
    moves = torch.cat([done - state for done, state in zip(actions, states, strict=True)])
    spread = moves.std(0, correction=0)
    is_target = (spread < TARGET_SHARE * unit) & scale.varies
    is_target[-1] = False
    shifted = [torch.where(is_target, state + moves.mean(0), mean) for state, mean in zip(states, means, strict=True)]
    return shifted, torch.where(is_target, spread, unit)


def _at(demonstration: Demonstration, name: str, times: Tensor) -> Tensor:
    values = demonstration.observations[name]
    return values[times] if isinstance(values, Tensor) else text_tensor([values[time] for time in times.tolist()])

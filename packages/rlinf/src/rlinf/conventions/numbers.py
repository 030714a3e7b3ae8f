"""What the numbers of demonstrations say by themselves: inputs that carry nothing, ranges, differences or targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf.conventions.frames import ComparedFrames, flat_actions, origin
from rlinf_envs import PICTURE, Demonstration

DARKEST = 1
"""A picture whose brightest value is at most this holds numbers in 0..1 that were read as 0..255."""
TELLING_CORRELATION = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadInput:
    """A field that the policy reads and that carries nothing."""

    convention: str
    evidence: str
    setting: str
    hides: str
    """What cannot be seen before it is mended."""


def dead_inputs(frames: ComparedFrames, reads: Sequence[str]) -> list[DeadInput]:
    """The fields that are the same in all frames, and pictures that are black; one for each convention."""
    dead: dict[str, DeadInput] = {}
    for one in _dead_fields(frames, reads):
        before = dead.get(one.convention)
        dead[one.convention] = one if before is None else replace(before, evidence=f"{before.evidence}; {one.evidence}")
    return list(dead.values())


def _dead_fields(frames: ComparedFrames, reads: Sequence[str]) -> list[DeadInput]:
    dead = []
    for name in reads:
        values = frames.fields[name]
        is_picture = name.startswith(PICTURE)
        if is_picture and int(values.max()) <= DARKEST:
            dead.append(
                DeadInput(
                    convention="picture range",
                    evidence=f"the brightest value of {name} in {len(values)} frames is {int(values.max())} of 255",
                    setting="give pictures as uint8 from 0 to 255; these look like floats in 0..1",
                    hides="pictures are black: what else is wrong with them cannot be seen, and a policy that sees "
                    "nothing seldom shows what else is wrong. Mend this first and run again",
                )
            )
        elif name != "instruction" and bool((values == values[:1]).all()):
            dead.append(
                DeadInput(
                    convention="constant state" if name == "state" else "constant picture",
                    evidence=f"{name} is the same in all {len(values)} frames",
                    setting="let the environment show it, or use a policy that does not read it",
                    hides=f"{name} never changes: what else is wrong with it cannot be seen. Mend this first and run "
                    "again",
                )
            )
        elif name == "instruction" and not values.any():
            dead.append(
                DeadInput(
                    convention="empty instruction",
                    evidence=f"the instruction is empty in all {len(values)} frames",
                    setting="let the environment show the sentence of its task",
                    hides="instructions are empty: what else is wrong with them cannot be seen. Mend this first and "
                    "run again",
                )
            )
    return dead


def range_lines(
    demonstrations: Sequence[Demonstration], frames: ComparedFrames, span: tuple[Tensor, Tensor] | None
) -> list[str]:
    """What the demonstrated actions look like.

    Args:
        span: what the policy's statistics scale to -1 and 1, [A] each; None: it has no statistics.
    """
    actions = torch.cat([flat_actions(one) for one in demonstrations])
    lines = []
    if not frames.scale.varies.all():
        numbers = ", ".join(str(n) for n, varies in enumerate(frames.scale.varies.tolist()) if not varies)
        lines.append(f"nearly constant, and left out: number {numbers} of an action (counted from 0)")
    if span is not None:
        low, high = span
        margin = 1e-6 * (high - low)
        shares = ((actions < low - margin) | (actions > high + margin)).float().mean(0)
        worst = int(shares.argmax())
        lines.append(
            f"outside the range of the policy's statistics: {shares[worst]:.1%} of number {worst} of the actions, the "
            f"most ({actions[:, worst].min():.3g} to {actions[:, worst].max():.3g}, statistics {low[worst]:.3g} to "
            f"{high[worst]:.3g})"
        )
    if (kind := differences_or_targets(demonstrations)) is not None:
        lines.append(kind)
    return lines


def differences_or_targets(demonstrations: Sequence[Demonstration]) -> str | None:
    """Whether actions are differences of the state or targets for it, by the correlation of all numbers but the last
    with the change of the state and with the next state; None if neither is clear."""
    pairs = []
    for one in demonstrations:
        actions = flat_actions(one)
        states, size = origin(one, actions.shape[1]), actions.shape[1] - 1
        if states is None or len(actions) < 3:
            return None
        pairs.append((actions[:-1, :size], states[:-1, :size], states[1:, :size]))
    actions, states, following = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    if not actions.shape[1]:
        return None
    change, target = correlation(actions, following - states), correlation(actions, following)
    if max(change, target) < TELLING_CORRELATION:
        return None
    word = "differences of the state" if change >= target else "targets for the state"
    return f"by the numbers, actions are {word} (correlation with its change {change:.2f}, with itself {target:.2f})"


def correlation(one: Tensor, other: Tensor) -> float:
    """The mean correlation of the columns of [T, A] and [T, A]; constant columns count as 0."""
    one, other = one - one.mean(0), other - other.mean(0)
    size = (one.square().sum(0) * other.square().sum(0)).sqrt()
    return torch.where(size > 1e-9, (one * other).sum(0) / size.clamp(min=1e-9), 0.0).mean().item()

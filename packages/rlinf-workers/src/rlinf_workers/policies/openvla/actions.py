"""Converts actions to bins and back by a dataset's statistics (arXiv:2406.09246, section 3.2).

The range between the 1st and the 99th percentile of a dimension in the dataset is scaled to -1..1, which has 256 edges;
a bin between two edges stands for their midpoint. There are 255 midpoints and 256 tokens, and the last two tokens mean
the same number. Here the last one means the next larger float32, so that the tokens can be recovered from an action; so
do equal numbers in a dimension with a very small range.

In the published checkpoints the last number is the gripper, 1 open and 0 closed, since OpenVLA's data pipeline aligns
all of its datasets; simulators have different conventions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlinf_envs import ActionSpec

GRIPPERS = {"as_is": None, "open_is_minus_one": -1.0, "open_is_one": 1.0}
"""The number that opens the environment's gripper; its negative closes it. None: the model's number, unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionStatistics:
    """The statistics of the A action dimensions in a dataset."""

    low: Sequence[float]
    """The value that is scaled to -1: the 1st percentile or the minimum."""
    high: Sequence[float]
    """The value that is scaled to 1: the 99th percentile or the maximum."""
    mask: Sequence[bool]
    """Whether the dimension was scaled; a gripper is not."""


def action_table(statistics: ActionStatistics, num_bins: int) -> Tensor:
    """[A, num_bins] float32, increasing: the number that each bin of each dimension stands for."""
    edges = np.linspace(-1, 1, num_bins)
    middles = (edges[:-1] + edges[1:]) / 2
    scaled = middles[np.minimum(np.arange(num_bins), num_bins - 2)]
    low, high = np.array(statistics.low)[:, None], np.array(statistics.high)[:, None]
    numbers = 0.5 * (scaled + 1) * (high - low + 1e-8) + low
    table = np.where(np.array(statistics.mask)[:, None], numbers, scaled).astype(np.float32)
    for column in range(1, num_bins):
        after = np.nextafter(table[:, column - 1], np.float32(np.inf))
        table[:, column] = np.maximum(table[:, column], after)
    return torch.from_numpy(table)


def actions_of(table: Tensor, bins: Tensor) -> Tensor:
    """[n, A] int64 -> [n, A] float32."""
    return table.gather(1, bins.T).T


def bins_of(table: Tensor, actions: Tensor) -> Tensor:
    """[n, A] -> [n, A] int64: the bins that stand for the nearest numbers; the inverse of `actions_of`."""
    borders = (table[:, :-1].double() + table[:, 1:].double()) / 2
    return torch.searchsorted(borders, actions.T.double().contiguous()).T


def act_with_gripper(numbers: Tensor, opens: float | None) -> Tensor:
    """[..., A] in the checkpoint's convention -> in the environment's: open above one half, else closed.

    Args:
        opens: a value of `GRIPPERS`.
    """
    if opens is None:
        return numbers
    gripper = numbers.new_full((), opens)
    return torch.cat([numbers[..., :-1], torch.where(numbers[..., -1:] > 0.5, gripper, -gripper)], dim=-1)


def learn_with_gripper(actions: Tensor, opens: float | None) -> Tensor:
    """[..., A] in the environment's convention -> in the checkpoint's: 1 if the number opens the gripper, else 0."""
    if opens is None:
        return actions
    return torch.cat([actions[..., :-1], (actions[..., -1:] * opens > 0).to(actions.dtype)], dim=-1)


def with_published_gripper(actions: ActionSpec) -> ActionSpec:
    """The same actions with the last number from 0 to 1, for the bins of a model in the published convention."""
    low, high = actions.low.flatten().clone(), actions.high.flatten().clone()
    low[-1], high[-1] = 0.0, 1.0
    return replace(actions, low=low.view_as(actions.low), high=high.view_as(actions.high))

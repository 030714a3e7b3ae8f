"""Baselines made of a group: samples of one prompt, turns or steps that began in one state.

Every function takes rewards in one of two forms, and gives its result in the same shape:
- [P, G], one row for each group, where all groups have one size;
- any shape ([B] samples, [B, K] turns) with `group_ids` of that shape: equal integers are one group, whatever their
  order, so that groups may differ in size (dynamic sampling, dropped samples, turns that share a state).

`mask` takes elements out: they get 0 and count in no baseline. A group must be whole on the rank that calls. Arithmetic
is float64, of a handful of numbers; results are at least float32 and carry no gradient.

Everywhere here, a group without any difference in rewards, and so a lone sample, gets advantages of exactly 0: never
rounding noise divided by epsilon, and never its raw reward, as in verl.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, at_least_float32, check_finite, check_range, check_shape
from rlinf_algos.errors import AlgosError, ShapeError


@torch.no_grad()
def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-4,
) -> Tensor:
    """Each reward against the others of its group (arXiv:2402.03300, section 4.1.2).

    `A = (reward - mean) / (std + epsilon)`, with the unbiased standard deviation (G - 1), as verl and TRL have it.

    Args:
        rewards: [P, G]; or any shape, with group_ids.
        group_ids: integers, the shape of rewards; None: each row is a group.
        mask: bool or 0/1, the shape of rewards; None: every element.
        normalize_std: False leaves out the division: `dr_grpo_advantages`.
        epsilon: keeps the division sane for nearly equal rewards; 1e-4 as in TRL (verl: 1e-6).

    Returns:
        the shape of rewards, at least float32.

    Raises:
        ShapeError: rewards is not [P, G] and has no group_ids, or shapes differ. NonFiniteError: a reward inside the
        mask is NaN or infinite. AlgosError: group_ids are not integers, a negative epsilon.

    Example: [[1, 0, 0, 1]] -> [[0.866, -0.866, -0.866, 0.866]]; [[1, 1, 1, 1]] -> [[0, 0, 0, 0]].
    """
    check_range("epsilon", epsilon, low=0.0, why="it is added to a standard deviation")
    groups = GroupRows.of(rewards, group_ids, mask)
    deviations = groups.deviations()
    if normalize_std:
        std = (deviations.square().sum(dim=1, keepdim=True) / (groups.sizes - 1.0).clamp(min=1.0)).sqrt()
        deviations = (deviations / (std + epsilon)).masked_fill(groups.is_constant, 0.0)
    return groups.restore(deviations)


def dr_grpo_advantages(rewards: Tensor, group_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """`reward - mean` of the group: Dr. GRPO (arXiv:2503.20783), which does not divide by the group's deviation since
    that weighs very easy and very hard prompts more. Its other half is `constant_length_mean`, in the aggregation.

    Arguments, result and errors as for `grpo_advantages`.
    """
    return grpo_advantages(rewards, group_ids, mask, normalize_std=False)


def rloo_advantages(rewards: Tensor, group_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """`reward - mean of the others of the group`: REINFORCE leave-one-out (arXiv:2402.14740), which is
    `G / (G - 1)` times Dr. GRPO's advantage. The baseline does not depend on the sample, so the gradient is unbiased.

    Arguments, result and errors as for `grpo_advantages`.
    """
    groups = GroupRows.of(rewards, group_ids, mask)
    return groups.restore(groups.deviations() * groups.sizes / (groups.sizes - 1.0).clamp(min=1.0))


@torch.no_grad()
def opo_advantages(
    rewards: Tensor, lengths: Tensor, group_ids: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """`reward - sum(lengths * rewards) / sum(lengths)` over the group: the baseline of least variance where the
    square of a gradient grows with the length (OPO, arXiv:2505.23585).

    Args:
        rewards, group_ids, mask: as for `grpo_advantages`.
        lengths: the shape of rewards, tokens of each completion, at least 0; a group of nothing but 0 weighs alike.

    Returns and raises: as `grpo_advantages`. AlgosError: a negative length.
    """
    check_shape("lengths", lengths, rewards.shape, "rewards")
    inside = as_mask("mask", mask, "rewards", rewards)
    check_finite("lengths", lengths, inside)
    if bool((lengths[inside] < 0).any()):
        raise AlgosError(f"lengths holds {float(lengths[inside].min()):g}; a completion has at least 0 tokens")
    groups = GroupRows.of(rewards, group_ids, mask)
    weights = groups.arrange(lengths)
    weights = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, groups.inside.to(weights.dtype))
    total = weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    # relative to the mean: digits survive a large common part of the rewards
    deviations = groups.deviations()
    baseline = (weights * deviations).sum(dim=1, keepdim=True) / total
    return groups.restore((deviations - baseline).masked_fill(groups.is_constant, 0.0))


@torch.no_grad()
def baseline_advantages(rewards: Tensor, baselines: Tensor, mask: Tensor | None = None) -> Tensor:
    """`rewards - baselines`, for a baseline that the caller has: the reward of a greedy completion of the same prompt
    (ReMax, arXiv:2310.10505), a value, a running mean.

    Args:
        rewards: any shape.
        baselines: the same shape; nothing broadcasts.
        mask: the same shape, bool or 0/1; None: every element. Others get 0.

    Raises: ShapeError, NonFiniteError.
    """
    check_shape("baselines", baselines, rewards.shape, "rewards")
    inside = as_mask("mask", mask, "rewards", rewards)
    check_finite("rewards", rewards, inside)
    check_finite("baselines", baselines, inside)
    return (at_least_float32(rewards) - at_least_float32(baselines)).masked_fill(~inside, 0.0)


def group_mean(rewards: Tensor, group_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """The mean of each element's group, in the shape of rewards; arguments and errors as for `grpo_advantages`."""
    groups = GroupRows.of(rewards, group_ids, mask)
    return groups.restore(groups.values - groups.deviations())


def leave_one_out_mean(rewards: Tensor, group_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """The mean of the *other* elements of each element's group; a lone one has its own value, for an advantage of 0.

    Arguments, result and errors as for `grpo_advantages`.
    """
    groups = GroupRows.of(rewards, group_ids, mask)
    deviations = groups.deviations() * groups.sizes / (groups.sizes - 1.0).clamp(min=1.0)
    return groups.restore(groups.values - deviations)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRows:
    """Elements laid out one group a row, and the way back.

    Example: rewards [1, 2, 3] with group_ids [7, 4, 7]:
        values = [[2, 0], [1, 3]], inside = [[1, 0], [1, 1]]
    """

    values: Tensor
    """[num_groups, largest group] float64, 0 where `inside` is False."""
    inside: Tensor
    """The shape of values, bool: where an element is."""
    places: tuple[Tensor, Tensor] | None
    """Row and column of each element inside the mask, in their order; None: the rows are the rewards' own."""
    mask: Tensor
    """The shape of the rewards, bool."""
    dtype: torch.dtype
    """Of the result."""

    @staticmethod
    @torch.no_grad()
    def of(rewards: Tensor, group_ids: Tensor | None, mask: Tensor | None) -> "GroupRows":
        """Lays rewards out; arguments and errors as for `grpo_advantages`."""
        inside = as_mask("mask", mask, "rewards", rewards)
        check_finite("rewards", rewards, inside)
        dtype = at_least_float32(torch.empty(0, dtype=rewards.dtype)).dtype
        if group_ids is None:
            if rewards.ndim != 2:
                raise ShapeError(
                    f"rewards has shape {list(rewards.shape)}; expected [P, G], one row for each prompt, or any shape "
                    "together with group_ids"
                )
            values = rewards.double().masked_fill(~inside, 0.0)
            return GroupRows(values=values, inside=inside, places=None, mask=inside, dtype=dtype)
        check_shape("group_ids", group_ids, rewards.shape, "rewards")
        if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
            raise AlgosError(f"group_ids has dtype {group_ids.dtype}; expected integers")
        _, row, sizes = torch.unique(group_ids[inside], return_inverse=True, return_counts=True)
        order = torch.argsort(row, stable=True)
        column = torch.empty_like(row)
        starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        column[order] = torch.arange(len(row), device=row.device) - starts
        shape = (len(sizes), int(sizes.max()) if len(sizes) else 0)
        filled = torch.zeros(shape, dtype=torch.bool, device=rewards.device)
        filled[row, column] = True
        groups = GroupRows(
            values=torch.zeros(shape, dtype=torch.float64, device=rewards.device),
            inside=filled,
            places=(row, column),
            mask=inside,
            dtype=dtype,
        )
        groups.values[row, column] = rewards[inside].double()
        return groups

    @property
    def sizes(self) -> Tensor:
        """[num_groups, 1] float64: elements of each group inside the mask."""
        return self.inside.sum(dim=1, keepdim=True).double()

    @property
    def is_constant(self) -> Tensor:
        """[num_groups, 1] bool: no two elements of the group differ. True for an empty group."""
        if self.values.shape[1] == 0:
            return torch.ones(len(self.values), 1, dtype=torch.bool, device=self.values.device)
        low = self.values.masked_fill(~self.inside, float("inf")).amin(dim=1, keepdim=True)
        high = self.values.masked_fill(~self.inside, float("-inf")).amax(dim=1, keepdim=True)
        return low >= high

    def deviations(self) -> Tensor:
        """The shape of values: each element less the mean of its group; exactly 0 in a constant group."""
        mean = self.values.sum(dim=1, keepdim=True) / self.sizes.clamp(min=1.0)
        return (self.values - mean).masked_fill(~self.inside | self.is_constant, 0.0)

    def arrange(self, tensor: Tensor) -> Tensor:
        """A tensor of the rewards' shape in the layout of values, float64."""
        if self.places is None:
            return tensor.double().masked_fill(~self.mask, 0.0)
        rows = torch.zeros_like(self.values)
        rows[self.places] = tensor[self.mask].double()
        return rows

    def first_places(self) -> Tensor:
        """[num_groups] int64: index, among the flattened rewards, of the first element of each group; beyond the last
        for an empty group."""
        if self.places is None:
            return torch.arange(len(self.values), device=self.values.device)
        flat = self.mask.reshape(-1).nonzero().squeeze(1)
        first = torch.full((len(self.values),), self.mask.numel(), device=flat.device)
        return first.scatter_reduce(0, self.places[0], flat, "amin")

    def restore(self, rows: Tensor) -> Tensor:
        """The shape of the rewards from the layout of values; 0 outside the mask."""
        if self.places is None:
            return rows.to(self.dtype).masked_fill(~self.mask, 0.0)
        result = torch.zeros(self.mask.shape, dtype=self.dtype, device=rows.device)
        result[self.mask] = rows[self.places].to(self.dtype)
        return result

"""Group baselines: samples of one prompt, turns or steps that began in one state.

Every function takes rewards [P, G], one row per group, and returns the same shape. `grpo_advantages` also takes groups
of different sizes, by `group_ids` (steps that share a state), and a mask. A group must be complete on the calling rank.
Arithmetic is float64, on a handful of numbers; results are at least float32 and carry no gradient.

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
        normalize_std: False leaves out the division: Dr. GRPO (arXiv:2503.20783), since it weighs very easy and
            very hard prompts more.
        epsilon: keeps the division sane for nearly equal rewards; 1e-4 as in TRL (verl: 1e-6).

    Returns:
        the shape of rewards, at least float32.

    Raises:
        ShapeError: rewards is not [P, G] and has no group_ids, or shapes differ. NonFiniteError: a reward inside the
        mask is NaN or infinite. AlgosError: group_ids are not integers, a negative epsilon.

    Example: [[1, 0, 0, 1]] -> [[0.866, -0.866, -0.866, 0.866]]; [[1, 1, 1, 1]] -> [[0, 0, 0, 0]].
    """
    check_range("epsilon", epsilon, low=0.0, why="it is added to a standard deviation")
    groups = Groups.of(rewards, group_ids, mask)
    deviations = groups.deviations()
    if normalize_std:
        deviations = deviations / (groups.std() + epsilon)[groups.index]
        deviations = deviations.masked_fill(groups.is_constant[groups.index], 0.0)
    return groups.restore(deviations)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """`reward - mean of the others of the group`: REINFORCE leave-one-out (arXiv:2402.14740), which is
    `G / (G - 1)` times Dr. GRPO's advantage. The baseline does not depend on the sample, so the gradient is unbiased.

    Arguments, result and errors as for `grpo_advantages`.
    """
    groups = Groups.of(rewards)
    return groups.restore(groups.deviations_from_others())


@torch.no_grad()
def opo_advantages(rewards: Tensor, lengths: Tensor) -> Tensor:
    """`reward - sum(lengths * rewards) / sum(lengths)` over the group: the minimum-variance baseline if the squared
    gradient norm grows with the length (OPO, arXiv:2505.23585).

    Args:
        rewards: [P, G].
        lengths: [P, G], tokens of each completion, at least 0; if all lengths of a group are 0, they weigh equally.

    Returns and raises: as `grpo_advantages`. AlgosError: a negative length.
    """
    check_shape("lengths", lengths, rewards.shape, "rewards")
    check_finite("lengths", lengths)
    if bool((lengths < 0).any()):
        raise AlgosError(f"lengths holds {float(lengths.min()):g}; a completion has at least 0 tokens")
    groups = Groups.of(rewards)
    deviations, weights = groups.deviations(), lengths.flatten().double()
    # Subtracting the mean first preserves digits under a large common offset; if all lengths are 0, the mean remains.
    baseline = groups.sum(weights * deviations) / groups.sum(weights).clamp(min=torch.finfo(weights.dtype).tiny)
    return groups.restore((deviations - baseline[groups.index]).masked_fill(groups.is_constant[groups.index], 0.0))


@torch.no_grad()
def pass_at_k_advantages(rewards: Tensor, *, normalize_std: bool = True, epsilon: float = 1e-4) -> Tensor:
    """The best sample of a group gets its margin over the second best, all others 0: the gradient of the group's
    largest reward, which is pass@k for k samples per group (arXiv:2503.19595, section 3), with a leave-one-out
    baseline.

    `A = (largest - second) / (std + epsilon)`. Two samples with the largest reward leave nothing to learn.

    Arguments, result and errors as for `grpo_advantages`; verl's `grpo_passk` has an epsilon of 1e-6.

    Example: [[1, 0, 0, 0]] -> [[2, 0, 0, 0]]; [[1, 1, 0, 0]] -> [[0, 0, 0, 0]].
    """
    check_range("epsilon", epsilon, low=0.0, why="it is added to a standard deviation")
    groups = Groups.of(rewards)
    if not len(groups.values):
        return groups.restore(groups.values)
    elements = torch.arange(len(groups.index), device=groups.index.device)
    best, place = groups.largest(groups.values), torch.full_like(groups.sizes, len(elements), dtype=torch.int64)
    is_best = groups.values == best[groups.index]
    place.scatter_reduce_(0, groups.index[is_best], elements[is_best], "amin")
    is_first = place[groups.index] == elements
    second = groups.largest(groups.values.masked_fill(is_first, -torch.inf))
    lead = (best - torch.where(groups.sizes > 1, second, best))[groups.index] * is_first
    return groups.restore(lead / (groups.std() + epsilon)[groups.index] if normalize_std else lead)


@torch.no_grad()
def gdpo_advantages(parts: Tensor, part_weights: Tensor, *, epsilon: float = 1e-4) -> Tensor:
    """`sum over k of part_weights[k] * grpo(parts[..., k])`: each component of the reward is normalised within its
    group before they are added, so that none is dominated by another's spread (GDPO, arXiv:2601.05242).

    The paper normalises the sums once more over the batch, which is left to the caller: `normalize_advantages`.

    Args:
        parts: [P, G, K], K components of the reward of each completion; a row of P is a group.
        part_weights: [K], any sign.
        epsilon: as for `grpo_advantages`.

    Returns:
        [P, G], at least float32. A component that is equal within a group adds exactly 0 to it.

    Raises: as `grpo_advantages`; ShapeError: parts is not [P, G, K], or part_weights not [K].
    """
    if parts.ndim != 3:
        raise ShapeError(f"parts has shape {list(parts.shape)}; expected [P, G, K], K parts of each reward")
    check_shape("part_weights", part_weights, parts.shape[2:], "parts[0, 0]")
    check_finite("part_weights", part_weights)
    num_prompts, group_size, num_parts = parts.shape
    rows = parts.movedim(2, 1).reshape(num_prompts * num_parts, group_size)
    normalized = grpo_advantages(rows, epsilon=epsilon).view(num_prompts, num_parts, group_size)
    return (normalized * part_weights.to(normalized.dtype)[None, :, None]).sum(dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The elements inside a mask, with the index of their group; n elements, S groups.

    Example: rewards [1, 2, 3] with group_ids [7, 4, 7]: values = [1, 2, 3], index = [1, 0, 1], sizes = [1, 2]
    """

    values: Tensor
    """[n] float64"""
    index: Tensor
    """[n] int64, 0 ... S - 1."""
    sizes: Tensor
    """[S] float64: elements of each group, at least 1."""
    mask: Tensor
    """The shape of the rewards, bool, n of them True."""
    dtype: torch.dtype
    """Type of the result."""

    @staticmethod
    @torch.no_grad()
    def of(rewards: Tensor, group_ids: Tensor | None = None, mask: Tensor | None = None) -> "Groups":
        """Arguments and errors as for `grpo_advantages`."""
        inside = as_mask("mask", mask, "rewards", rewards)
        check_finite("rewards", rewards, inside)
        if group_ids is None:
            if rewards.ndim != 2:
                raise ShapeError(
                    f"rewards has shape {list(rewards.shape)}; expected [P, G], one row for each prompt, or any shape "
                    "together with group_ids"
                )
            group_ids = torch.arange(len(rewards), device=rewards.device)[:, None].expand(rewards.shape)
        check_shape("group_ids", group_ids, rewards.shape, "rewards")
        if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
            raise AlgosError(f"group_ids has dtype {group_ids.dtype}; expected integers")
        _, index, sizes = torch.unique(group_ids[inside], return_inverse=True, return_counts=True)
        return Groups(
            values=rewards[inside].double(),
            index=index,
            sizes=sizes.double(),
            mask=inside,
            dtype=at_least_float32(torch.empty(0, dtype=rewards.dtype)).dtype,
        )

    @property
    def is_constant(self) -> Tensor:
        """[S] bool: no two elements of the group differ."""
        return -self.largest(-self.values) == self.largest(self.values)

    def largest(self, elements: Tensor) -> Tensor:
        """[S]: the largest of each group's elements [n]."""
        return torch.empty_like(self.sizes).scatter_reduce_(0, self.index, elements, "amax", include_self=False)

    def std(self) -> Tensor:
        """[S]: the unbiased standard deviation of each group; 0 of a lone element."""
        return (self.sum(self.deviations().square()) / (self.sizes - 1.0).clamp(min=1.0)).sqrt()

    def sum(self, elements: Tensor) -> Tensor:
        """[S]: sums over each group of elements [n]."""
        return torch.zeros_like(self.sizes).index_add_(0, self.index, elements)

    def deviations(self) -> Tensor:
        """[n]: each element less the mean of its group; exactly 0 in a constant group."""
        mean = self.sum(self.values) / self.sizes
        return (self.values - mean[self.index]).masked_fill(self.is_constant[self.index], 0.0)

    def deviations_from_others(self) -> Tensor:
        """[n]: each element less the mean of the others of its group; exactly 0 in a constant group."""
        return self.deviations() * (self.sizes / (self.sizes - 1.0).clamp(min=1.0))[self.index]

    def restore(self, elements: Tensor) -> Tensor:
        """The shape of the rewards from elements [n], in the dtype of a result; 0 outside the mask."""
        result = torch.zeros(self.mask.shape, dtype=self.dtype, device=elements.device)
        result[self.mask] = elements.to(self.dtype)
        return result

"""Means, whitening and explained variance under a mask, over one tensor or over a batch that many ranks hold.

Statistics are those of the tensor given: to normalise over a whole batch, call this before splitting it into
micro-batches (CleanRL normalises each minibatch, verl the batch; the caller chooses by what it passes). Where the batch
is spread over data-parallel ranks, `sum_over_ranks` makes the statistics those of all ranks; where it comes in pieces,
`Moments.merge` does. Both give what one rank with everything would: float64, deviations from the mean (two passes), and
never `E[x^2] - E[x]^2`, whose digits cancel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_finite, check_range, check_shape, masked
from rlinf_algos.errors import NonFiniteError

SumOverRanks: TypeAlias = Callable[[Tensor], Tensor]
"""Takes a float64 vector, returns the sum of what all ranks passed, on each of them. Every rank must call, as often."""


def masked_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of the elements inside the mask; 0 where there is none.

    Args:
        values: any shape.
        mask: the same shape, bool or 0/1; None: every element.

    Returns:
        a scalar tensor, at least float32, differentiable.
    """
    inside = as_mask("mask", mask, "values", values)
    return masked("values", values, inside).sum() / inside.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor | None = None, *, epsilon: float = 1e-8) -> Tensor:
    """`(values - mean) / (std + epsilon)` over the elements inside the mask, with the unbiased deviation.

    Elements outside the mask, and all of them where those inside are equal (or there is only one), become exactly 0.

    Args:
        values: any shape.
        mask: the same shape, bool or 0/1; None: every element.
        epsilon: added to the standard deviation (as in CleanRL; verl adds it to the variance).

    Returns:
        the same shape, at least float32, differentiable.
    """
    check_range("epsilon", epsilon, low=0.0, why="it is added to a standard deviation")
    inside = as_mask("mask", mask, "values", values)
    filled = masked("values", values, inside)
    chosen = filled[inside]
    if chosen.numel() < 2 or bool((chosen == chosen[0]).all()):
        return filled * 0.0
    return ((filled - chosen.mean()) / (chosen.std() + epsilon)).masked_fill(~inside, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Count, mean and spread of some numbers; float64 scalars.

    Example: of 1, 2, 6: count = 3, mean = 3, squared_deviations = 4 + 1 + 9 = 14, variance = 7
    """

    count: Tensor
    mean: Tensor
    """Mean of the numbers; 0 if there are none."""
    squared_deviations: Tensor
    """Sum of (x - mean)^2; exactly 0 where all numbers are equal."""

    @staticmethod
    @torch.no_grad()
    def of(
        values: Tensor,
        mask: Tensor | None = None,
        *,
        sum_over_ranks: SumOverRanks | None = None,
        name: str = "values",
    ) -> "Moments":
        """The moments of the elements inside the mask, on this rank or on all of them.

        Args:
            values: any shape, which may differ between ranks; a rank may have nothing.
            mask: the same shape, bool or 0/1; None: every element.
            sum_over_ranks: three small sums are taken through it; None: this tensor alone.
            name: what errors call the values.

        Raises:
            ShapeError. NonFiniteError: inside the mask, on *every* rank if it is on one, so that none waits for it.
        """
        inside = as_mask("mask", mask, name, values)
        total = sum_over_ranks or (lambda tensor: tensor)
        try:
            return Moments.of_parts([values.detach()[inside]], lambda rows: total(rows[0]), name=name)
        except NonFiniteError:
            check_finite(name, values, inside)  # says where
            raise

    @staticmethod
    @torch.no_grad()
    def of_parts(
        parts: Sequence[Tensor], sum_over_parts: Callable[[Tensor], Tensor], *, name: str = "values"
    ) -> "Moments":
        """The moments of numbers that come in parts (the shards of a batch), which are summed in an order of their own,
        so that nothing depends on the rank that has a part.

        Args:
            parts: the parts that this rank has, of any shape; a part may be empty.
            sum_over_parts: takes one float64 row a part of this rank, [len(parts), k], returns the sum over all parts
                of all ranks, [k], on each of them; called three times.
            name: what errors call the values.

        Raises: NonFiniteError, on every rank if it is on one.
        """
        flat = [part.detach().double().flatten() for part in parts]
        bad = [~torch.isfinite(part) for part in flat]
        first = [torch.stack([_count(b), b.sum().double(), _finite_sum(p, b)]) for p, b in zip(flat, bad, strict=True)]
        count, num_bad, value_sum = sum_over_parts(torch.stack(first))
        if num_bad > 0:
            here = [number for number, b in enumerate(bad) if bool(b.any())]
            where = f"in part {here[0]} of this rank" if here else "on other ranks than this"
            raise NonFiniteError(f"{name} holds {int(num_bad)} elements that are not finite, {where}")
        rough_mean = value_sum / count.clamp(min=1.0)
        # What rounding left between the rough mean and the mean; for equal numbers it makes the mean that number.
        left = sum_over_parts(torch.stack([(part - rough_mean).sum()[None] for part in flat]))[0]
        mean = rough_mean + left / count.clamp(min=1.0)
        squares = sum_over_parts(torch.stack([(part - mean).square().sum()[None] for part in flat]))[0]
        return Moments(count=count, mean=mean, squared_deviations=squares)

    def merge(self, other: "Moments") -> "Moments":
        """The moments of both sets of numbers together (T. F. Chan, G. H. Golub and R. J. LeVeque, 1979)."""
        count = self.count + other.count
        difference, share = other.mean - self.mean, other.count / count.clamp(min=1.0)
        return Moments(
            count=count,
            mean=self.mean + difference * share,
            squared_deviations=self.squared_deviations
            + other.squared_deviations
            + difference.square() * self.count * share,
        )

    @property
    def variance(self) -> Tensor:
        """Unbiased (count - 1); 0 for fewer than two numbers."""
        return self.squared_deviations / (self.count - 1.0).clamp(min=1.0)

    @torch.no_grad()
    def whiten(
        self, values: Tensor, mask: Tensor | None = None, *, epsilon: float = 1e-8, in_float64: bool = True
    ) -> Tensor:
        """`(values - mean) / (sqrt(variance) + epsilon)`, a constant; exactly 0 outside the mask, and everywhere if the
        numbers that these are the moments of are all equal.

        Args:
            values: any shape; mask: the same shape, bool or 0/1, None: every element.
            epsilon: added to the standard deviation.
            in_float64: False: this last line in the dtype of the values, for numbers of a batch's size on a device.

        Returns:
            the same shape, at least float32.
        """
        check_range("epsilon", epsilon, low=0.0, why="it is added to a standard deviation")
        inside = as_mask("mask", mask, "values", values)
        filled = masked("values", values, inside)
        if not bool(self.squared_deviations > 0):
            return torch.zeros_like(filled)
        centred = (filled.double() if in_float64 else filled) - float(self.mean)
        whitened = centred / float(self.variance.sqrt() + epsilon)
        return whitened.to(filled.dtype).masked_fill(~inside, 0.0)


def normalize_advantages(
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    epsilon: float = 1e-8,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """`masked_whiten` of advantages, as a constant without gradient, over this rank or over all of them.

    Args:
        advantages, mask, epsilon: as for `masked_whiten`; shapes may differ between ranks.
        sum_over_ranks: statistics are those of all ranks' elements; see `sum_over_group`. None: of this tensor.
    """
    check_range("epsilon", epsilon, low=0.0, why="it is added to a standard deviation")
    moments = Moments.of(advantages, mask, sum_over_ranks=sum_over_ranks, name="advantages")
    return moments.whiten(advantages, mask, epsilon=epsilon)


def normalize_returns(
    returns: Tensor,
    mask: Tensor | None = None,
    *,
    epsilon: float = 1e-8,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """The critic's targets with mean 0 and deviation 1 over the batch (RLinf: `normalize_returns`); arguments as for
    `normalize_advantages`. Advantages must come from the returns and values *before* it."""
    check_range("epsilon", epsilon, low=0.0, why="it is added to a standard deviation")
    moments = Moments.of(returns, mask, sum_over_ranks=sum_over_ranks, name="returns")
    return moments.whiten(returns, mask, epsilon=epsilon)


def sum_over_group(group: Any = None) -> SumOverRanks:
    """`sum_over_ranks` of a process group of torch.distributed, gloo or NCCL; None: the default one.

    The tensors given to it must be where the backend works: on the GPU for NCCL.
    """
    import torch.distributed as dist

    def sum_over_ranks(tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    return sum_over_ranks


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """`1 - var(returns - values) / var(returns)`: 1 is a perfect critic, 0 no better than a constant, below 0 worse.

    Args:
        values: the critic's predictions, any shape.
        returns: what they should have been, the same shape.
        mask: the same shape, bool or 0/1; None: every element.

    Returns:
        a scalar tensor; NaN where it is undefined: returns that are all equal, or none.
    """
    check_shape("returns", returns, values.shape, "values")
    inside = as_mask("mask", mask, "values", values)
    chosen_returns = masked("returns", returns, inside)[inside]
    errors = chosen_returns - masked("values", values, inside)[inside]
    if chosen_returns.numel() == 0 or bool((chosen_returns == chosen_returns[0]).all()):
        return torch.full((), float("nan"), dtype=errors.dtype, device=errors.device)
    return 1.0 - errors.var(correction=0) / chosen_returns.var(correction=0)


def _count(part: Tensor) -> Tensor:
    return torch.tensor(float(part.numel()), dtype=torch.float64, device=part.device)


def _finite_sum(chosen: Tensor, bad: Tensor) -> Tensor:
    return chosen.masked_fill(bad, 0.0).sum()

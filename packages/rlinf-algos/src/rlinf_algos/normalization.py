"""Masked means, and the moments of a batch distributed over ranks, for whitening.

`Moments.of_parts` computes what one rank with the whole batch would: float64, deviations from the mean (two passes),
never `E[x^2] - E[x]^2`, which loses digits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, masked
from rlinf_algos.errors import NonFiniteError

EPSILON = 1e-8
"""Added to the standard deviation, as in CleanRL (verl adds it to the variance)."""


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

    @property
    def variance(self) -> Tensor:
        """Unbiased (count - 1); 0 for fewer than two numbers."""
        return self.squared_deviations / (self.count - 1.0).clamp(min=1.0)

    @torch.no_grad()
    def whiten(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """`(values - mean) / (sqrt(variance) + EPSILON)`, a constant; exactly 0 outside the mask, and everywhere if the
        numbers that these are the moments of are all equal.

        Args:
            values: any shape; mask: the same shape, bool or 0/1, None: every element.

        Returns:
            the same shape, at least float32.
        """
        inside = as_mask("mask", mask, "values", values)
        filled = masked("values", values, inside)
        if not bool(self.squared_deviations > 0):
            return torch.zeros_like(filled)
        whitened = (filled - float(self.mean)) / float(self.variance.sqrt() + EPSILON)
        return whitened.masked_fill(~inside, 0.0)


def _count(part: Tensor) -> Tensor:
    return torch.tensor(float(part.numel()), dtype=torch.float64, device=part.device)


def _finite_sum(chosen: Tensor, bad: Tensor) -> Tensor:
    return chosen.masked_fill(bad, 0.0).sum()

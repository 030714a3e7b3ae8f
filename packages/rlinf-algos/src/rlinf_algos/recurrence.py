"""Linear recurrences over time, backwards: `x[t] = terms[t] + decay[t] * x[t + 1]`, in log2(T) passes.

A loop over T = 4,096 tokens is 4,096 times a handful of tiny operations, whose launches alone cost a GPU more than the
arithmetic. Here neighbouring steps are composed and the span doubles (W. D. Hillis and G. L. Steele, "Data parallel
algorithms", 1986). Sums become pairwise, so rounding errors are no larger than the loop's, and the factors only shrink.
"""

from torch import Tensor


def backward_recurrence(terms: Tensor, decay: Tensor, dim: int) -> Tensor:
    """`x[t] = terms[t] + decay[t] * x[t + 1]` along `dim`, with `x[T] = 0`.

    Args:
        terms: any shape, floating, finite.
        decay: the same shape and dtype, in [0, 1]; the last one is not used.
        dim: the dimension that is time.

    Returns:
        the shape of terms; not differentiable as it stands, since it works in place on copies.
    """
    result, factors = terms.clone(), decay.clone()
    num_steps, span = terms.shape[dim], 1
    while span < num_steps:
        here, there = (dim, 0, num_steps - span), (dim, span, num_steps - span)
        # Each right side is whole before its left side changes.
        result.narrow(*here).add_(factors.narrow(*here) * result.narrow(*there))
        factors.narrow(*here).copy_(factors.narrow(*here) * factors.narrow(*there))
        span *= 2
    return result

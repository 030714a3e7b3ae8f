"""Logits of any number of dimensions as matrices, without a copy."""

from collections.abc import Iterator

from torch import Tensor


def matrices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape [..., V] as views [n, V], the same rows of each, in row order. `reshape` would copy a slice
    such as logits[:, :-1] whole."""
    first = tensors[0]
    if first.ndim == 1:
        yield tuple(tensor[None] for tensor in tensors)
    elif first.ndim == 2:
        yield tensors
    elif all(tensor.is_contiguous() for tensor in tensors):
        yield tuple(tensor.view(-1, first.shape[-1]) for tensor in tensors)
    else:
        for parts in zip(*tensors, strict=True):
            yield from matrices(*parts)

"""Aggregation of unreduced terms [B, T] to one scalar loss.

Every function divides by a total that the *caller* counts over the whole update (all micro-batches, all ranks), so the
results of the micro-batches add up exactly to that of the batch: splitting and padding of a batch do not change the
update. `count_tokens_and_sequences` counts one micro-batch. With data parallelism, sum counts and gradients over ranks,
or multiply the loss by the number of ranks if gradients are averaged.

A row [T] is a whole sequence.
"""

from torch import Tensor

from rlinf_algos.checks import as_mask, masked
from rlinf_algos.errors import AlgosError, ShapeError


def token_mean(terms: Tensor, mask: Tensor | None, total_tokens: int | float | Tensor) -> Tensor:
    """Sum over the tokens inside the mask / total_tokens: every token weighs the same (DAPO, arXiv:2503.14476).

    Args:
        terms: any shape; [B, T] for tokens.
        mask: the same shape, bool or 0/1; None: every element.
        total_tokens: tokens inside the masks of the whole update, at least those of this mask. 0 is allowed with an
            empty mask and gives 0.

    Returns:
        a scalar tensor, at least float32, differentiable.

    Raises:
        ShapeError, NonFiniteError. AlgosError: fewer total_tokens than tokens in this mask.
    """
    inside = as_mask("mask", mask, "terms", terms)
    return masked("terms", terms, inside).sum() / _total("total_tokens", total_tokens, inside.sum(), "tokens")


def token_sum(terms: Tensor, mask: Tensor | None) -> Tensor:
    """Sum over the tokens inside the mask, without division (verl's `token-sum`): the gradient grows with the number of
    tokens, which optimizers that normalise the gradient, such as AdamW, cancel out.

    Args, returns and raises: as `token_mean`.
    """
    return masked("terms", terms, as_mask("mask", mask, "terms", terms)).sum()


def sequence_mean_token_mean(
    terms: Tensor,
    mask: Tensor | None,
    total_sequences: int | float | Tensor,
) -> Tensor:
    """Mean over each sequence's tokens, then the sum / total_sequences: GRPO as first published (arXiv:2402.03300).

    Every sequence weighs the same, so a token of a long one weighs less. Sequences with an empty mask add 0.

    Args:
        terms: [B, T]. mask: [B, T], bool or 0/1; None: every element.
        total_sequences: sequences of the whole update, at least those of this mask (sequences with an empty mask count
            if the caller counts them).

    Returns and raises: as `token_mean`.
    """
    filled, inside = _inside(terms, mask)
    return sequence_means(filled, inside).sum() / _total_sequences(total_sequences, inside)


def sequence_mean_token_sum(
    terms: Tensor,
    mask: Tensor | None,
    total_sequences: int | float | Tensor,
) -> Tensor:
    """Sum over each sequence's tokens, then the sum / total_sequences; arguments as `sequence_mean_token_mean`."""
    filled, inside = _inside(terms, mask)
    return filled.sum() / _total_sequences(total_sequences, inside)


def constant_length_mean(
    terms: Tensor,
    mask: Tensor | None,
    total_sequences: int | float | Tensor,
    max_completion_tokens: int,
) -> Tensor:
    """Sum over all tokens / (total_sequences * max_completion_tokens): Dr. GRPO (arXiv:2503.20783).

    A constant instead of each sequence's length, so that weights do not depend on lengths.

    Args:
        terms, mask, total_sequences: as `sequence_mean_token_mean`.
        max_completion_tokens: the run's limit on a completion's length, at least 1; not the longest of this batch.
    """
    if max_completion_tokens < 1:
        raise AlgosError(f"max_completion_tokens={max_completion_tokens} must be at least 1")
    return sequence_mean_token_sum(terms, mask, total_sequences) / max_completion_tokens


def aggregated_sum(aggregation: str, terms: Tensor, mask: Tensor | None) -> Tensor:
    """The numerator of the named aggregation, for an update whose totals are only known at its end: sums of
    micro-batches, added up and divided by the sum of their `aggregation_divisor`, equal the aggregation of the batch.

    Args, raises: as `sequence_mean_token_mean`.

    Returns:
        a scalar tensor, at least float32, differentiable.
    """
    if aggregation in ("token_mean", "token_sum"):
        return token_sum(terms, mask)
    filled, inside = _inside(terms, mask)
    return sequence_means(filled, inside).sum() if aggregation == "sequence_mean_token_mean" else filled.sum()


def aggregation_divisor(aggregation: str, mask: Tensor, *, max_completion_tokens: int) -> float:
    """The denominator for `aggregated_sum`: tokens, sequences, sequences * max_completion_tokens, or 0 for `token_sum`,
    which has none: divide by `aggregation_divisor or 1`.

    Args: mask: as `count_tokens_and_sequences`. max_completion_tokens: as `constant_length_mean`.
    """
    num_tokens, num_sequences = count_tokens_and_sequences(mask)
    if aggregation in ("token_mean", "token_sum"):
        return float(num_tokens) if aggregation == "token_mean" else 0.0
    return float(num_sequences) * (max_completion_tokens if aggregation == "constant_length_mean" else 1)


def count_tokens_and_sequences(mask: Tensor) -> tuple[Tensor, Tensor]:
    """A micro-batch's contribution to the totals of its update.

    Args:
        mask: [B, T], bool or 0/1.

    Returns:
        scalars int64: tokens inside the mask, and sequences with at least one; sum both over micro-batches and ranks.
    """
    inside = as_mask("mask", mask, "mask", mask)
    check_rows(inside)
    return inside.sum(), inside.any(dim=1).sum()


def sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    """[B]: means over the tokens of each sequence; 0 for one without any; differentiable.

    Args:
        values: [B, T], 0 outside the mask. mask: [B, T] bool.
    """
    check_rows(mask)
    return values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def check_rows(mask: Tensor) -> None:
    """Raises `ShapeError` unless the mask is [B, T]."""
    if mask.ndim != 2:
        raise ShapeError(f"terms of sequences have shape {list(mask.shape)}; expected [B, T]")


def _inside(terms: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Terms [B, T] with 0 outside the mask, and the mask as bool."""
    if terms.ndim != 2:
        raise ShapeError(f"terms has shape {list(terms.shape)}; expected [B, T]")
    inside = as_mask("mask", mask, "terms", terms)
    return masked("terms", terms, inside), inside


def _total_sequences(total: int | float | Tensor, inside: Tensor) -> float:
    return _total("total_sequences", total, inside.any(dim=1).sum(), "sequences with tokens")


def _total(name: str, total: int | float | Tensor, num_here: Tensor, what: str) -> float:
    """The divisor; 1 instead of 0 for an update without any term, whose loss is 0."""
    if isinstance(total, Tensor) and total.numel() != 1:
        raise ShapeError(f"{name} has shape {list(total.shape)}; expected one number")
    number = float(total)
    if not number >= int(num_here) or number == float("inf"):  # `not >=` catches NaN too
        raise AlgosError(
            f"{name}={number:g}, but this mask alone holds {int(num_here)} {what}; pass the count over all "
            "micro-batches and ranks of the update"
        )
    return number or 1.0

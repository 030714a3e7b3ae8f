"""Log-probabilities and entropies of tokens, from logits of any precision, without a second copy of them.

A vocabulary of 151,936 makes the float32 log-softmax of 8 x 4,096 tokens 18.5 GiB. Here both passes process the rows in
chunks: the forward pass keeps one number per row (the logsumexp), the backward pass recomputes a chunk's softmax and
writes it into the gradient, which has the dtype of the logits. All arithmetic is float32 (float64 for float64 logits).

Logits of -inf (a banned token) are fine; a chosen token must not have one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlinf_algos.checks import as_mask, deferred_checks
from rlinf_algos.errors import AlgosError, NonFiniteError, ShapeError

LEAST_LOGPROB = -1e4
"""Stands for the logarithm of probability 0 in every dtype: -inf times 0 would be NaN, while p log p is 0."""

_CPU_CHUNK_ELEMENTS = 1 << 20
"""4 MiB of float32. Measured at V = 150,000, one core: 2^16 to 2^20 take the same time, 2^22 1.3 and 2^24 2 to 3 times
as long."""

_DEVICE_CHUNK_ELEMENTS = 1 << 26
"""256 MiB of float32: on a GPU each chunk costs a handful of kernel launches, which small chunks would not amortise."""


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperature: float = 1.0, *, loss_mask: Tensor | None = None
) -> Tensor:
    """`log softmax(logits / temperature)` at the given tokens.

    Args:
        logits: [B, T, V], or any [..., V]; any floating dtype; need not be contiguous.
        token_ids: [B, T] integers in 0 ... V - 1; logits[b, t] must be those that *predicted* token_ids[b, t].
        temperature: the one the tokens were sampled with, above 0.
        loss_mask: [B, T], bool or 0/1; positions outside (padding) give 0.0 and no gradient, unchecked. None: all.

    Returns:
        [B, T] float32 (float64 for float64 logits), nats, differentiable once.

    Raises:
        ShapeError: shapes do not fit. NonFiniteError: NaN or +inf in a row, or -inf at the token.
        AlgosError: a token id out of range, a temperature not above 0.
    """
    mask = checked_mask(logits, temperature, loss_mask)
    ids = checked_ids(logits, token_ids, mask)
    (result,) = _TokenStatistics.apply(
        logits, ids.reshape(-1), mask.reshape(-1), float(temperature), False, loss_mask is None
    )
    result = result.view(mask.shape)
    check_rows(result, mask, ids, lambda index: logits.detach()[index])
    return result


def entropy_of_logits(logits: Tensor, temperature: float = 1.0, *, loss_mask: Tensor | None = None) -> Tensor:
    """Entropy of `softmax(logits / temperature)`.

    Args:
        logits, temperature, loss_mask: as for `token_logprobs`.

    Returns:
        [B, T] float32 (float64 for float64 logits), nats, between 0 and log V, differentiable once.

    Raises:
        ShapeError, NonFiniteError, AlgosError: as for `token_logprobs`.
    """
    mask = checked_mask(logits, temperature, loss_mask)
    (result,) = _TokenStatistics.apply(logits, None, mask.reshape(-1), float(temperature), True, loss_mask is None)
    result = result.view(mask.shape)
    check_rows(result, mask, None, lambda index: logits.detach()[index])
    return result


def logprobs_and_entropy(
    logits: Tensor, token_ids: Tensor, temperature: float = 1.0, *, loss_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` and `entropy_of_logits` in one pass over the logits, forward and backward: the same numbers to
    the bit, in less time than the two.

    Args, raises: as `token_logprobs`.

    Returns:
        log-probabilities and entropies, each [B, T] float32 (float64 for float64 logits), nats, differentiable once.
    """
    mask = checked_mask(logits, temperature, loss_mask)
    ids = checked_ids(logits, token_ids, mask)
    both = _TokenStatistics.apply(
        logits, ids.reshape(-1), mask.reshape(-1), float(temperature), True, loss_mask is None
    )
    logprobs, entropies = (flat.view(mask.shape) for flat in both)
    check_rows(logprobs, mask, ids, lambda index: logits.detach()[index])
    return logprobs, entropies


@torch.no_grad()
def logit_norms(
    logits: Tensor, token_ids: Tensor, temperature: float = 1.0, *, loss_mask: Tensor | None = None
) -> Tensor:
    """`1 - 2 p + sum of p^2`, with p the probabilities of `softmax(logits / temperature)`: the squared norm of the
    gradient of the token's log-probability for its scaled logits (for `optimal_token_advantages`).

    Args, raises: as `token_logprobs`.

    Returns:
        [B, T] float32 (float64 for float64 logits), between 0 and 2, without gradient.
    """
    mask = checked_mask(logits, temperature, loss_mask)
    ids = checked_ids(logits, token_ids, mask)
    norms = torch.empty(mask.numel(), dtype=compute_dtype(logits), device=logits.device)
    for rows, chunk, buffers in _chunks(logits, num_buffers=1):
        largest = chunk.amax(dim=-1).to(norms.dtype) / temperature
        weights = _shifted(chunk, largest, temperature, out=buffers[0]).exp_()
        probs = weights.div_(weights.sum(dim=-1, keepdim=True))
        at_token = probs.gather(1, ids.reshape(-1)[rows, None]).squeeze(1)
        norms[rows] = 1.0 - 2.0 * at_token + probs.square_().sum(dim=-1)
    result = norms.view(mask.shape).masked_fill(~mask, 0.0)
    check_rows(result, mask, ids, lambda index: logits.detach()[index])
    return result.clamp_(min=0.0)


class _TokenStatistics(torch.autograd.Function):
    """Log-probabilities, entropies, or both, flat; what is not wanted costs nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor | None,
        mask: Tensor,
        temperature: float,
        wants_entropy: bool,
        is_whole: bool,
    ) -> tuple[Tensor, ...]:
        logsumexp = torch.empty(len(mask), dtype=compute_dtype(logits), device=logits.device)
        logprobs = entropies = None
        if ids is not None:
            logprobs = torch.empty_like(logsumexp)
        if wants_entropy:
            entropies = torch.empty_like(logsumexp)
        for rows, chunk, buffers in _chunks(logits, num_buffers=2 if wants_entropy else 1):
            largest = chunk.amax(dim=-1).to(logsumexp.dtype) / temperature
            shifted = _shifted(chunk, largest, temperature, out=buffers[0])
            if logprobs is not None and ids is not None:
                logprobs[rows] = shifted.gather(1, ids[rows, None]).squeeze(1)
            weights = torch.exp(shifted, out=buffers[-1])
            total = weights.sum(dim=-1)
            log_total = total.log()
            logsumexp[rows] = largest + log_total
            if logprobs is not None:
                logprobs[rows] -= log_total
            if entropies is not None:
                expectation = weights.mul_(shifted.clamp_(min=LEAST_LOGPROB)).sum(dim=-1) / total
                entropies[rows] = log_total - expectation
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, ids, mask, logsumexp, entropies)
        ctx.temperature = temperature
        ctx.is_whole = is_whole or (None if deferred_checks() is None else False)
        """Whether the mask has all rows; None: it is read."""
        return tuple(out.masked_fill_(~mask, 0.0) for out in (logprobs, entropies) if out is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, ids, mask, logsumexp, entropies = ctx.saved_tensors
        of_logprobs = grads[0] if ids is not None else None
        of_entropies = grads[-1] if entropies is not None else None
        if of_logprobs is None and of_entropies is None:
            return None, None, None, None, None, None
        zeros = torch.zeros_like(logsumexp)
        slope = zeros if of_logprobs is None else of_logprobs / ctx.temperature
        weight = zeros if of_entropies is None else of_entropies / ctx.temperature
        offset = slope if entropies is None else slope + weight * entropies
        grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        flat = grad_logits.view(-1, logits.shape[-1])
        is_whole, is_exact = ctx.is_whole, flat.dtype == logsumexp.dtype
        is_whole = bool(mask.all()) if is_whole is None else is_whole
        for rows, chunk, buffers in _chunks(logits, num_buffers=1 if is_exact else 2):
            shifted = _shifted(chunk, logsumexp[rows], ctx.temperature, out=buffers[0])
            probs = torch.exp(shifted, out=flat[rows] if is_exact else buffers[1])
            if of_entropies is None:
                probs.mul_(-slope[rows, None])
            else:  # p * (-slope - weight * (log p + H))
                probs.mul_(shifted.clamp_(min=LEAST_LOGPROB).mul_(-weight[rows, None]).sub_(offset[rows, None]))
            if ids is not None:
                at_token = probs.gather(1, ids[rows, None]) + slope[rows, None]
                probs.scatter_(1, ids[rows, None], at_token)  # one target a row: no atomic additions as in scatter_add_
            if not is_whole:
                probs.masked_fill_(~mask[rows, None], 0.0)
            if not is_exact:
                flat[rows] = probs
        return grad_logits, None, None, None, None, None


def _shifted(chunk: Tensor, shift: Tensor, temperature: float, out: Tensor) -> Tensor:
    """`chunk / temperature - shift`, [n, V], written into `out`, whose dtype is that of the arithmetic."""
    if chunk.dtype == out.dtype and temperature == 1.0:
        return torch.sub(chunk, shift[:, None], out=out)
    out.copy_(chunk)
    if temperature != 1.0:
        out.div_(temperature)
    return out.sub_(shift[:, None])


def _chunks(logits: Tensor, num_buffers: int) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
    """Row ranges of the flattened [..., V] logits, those rows, and buffers of their shape that the next chunk reuses:
    fresh memory for each would cost more than the arithmetic, in page faults."""
    num_elements = _CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    vocab = logits.shape[-1]
    num_rows = max(1, num_elements // vocab)
    num_rows = min(num_rows, max(1, logits.numel() // vocab))
    options: Any = {"dtype": compute_dtype(logits), "device": logits.device}
    buffers = [torch.empty(num_rows, vocab, **options) for _ in range(num_buffers)]
    start = 0
    for matrix in _matrices(logits.detach()):
        for chunk in matrix.split(num_rows):
            yield slice(start, start + len(chunk)), chunk, [buffer[: len(chunk)] for buffer in buffers]
            start += len(chunk)


def _matrices(logits: Tensor) -> Iterator[Tensor]:
    """[..., V] as views [n, V], in row order. `reshape` would copy a slice such as logits[:, :-1] whole."""
    if logits.ndim == 1:
        yield logits[None]
    elif logits.ndim == 2:
        yield logits
    elif logits.is_contiguous():
        yield logits.view(-1, logits.shape[-1])
    else:
        for part in logits:
            yield from _matrices(part)


def compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def checked_mask(logits: Tensor, temperature: float, loss_mask: Tensor | None) -> Tensor:
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ShapeError(f"logits has shape {list(logits.shape)}; expected [B, T, V] with at least one token in V")
    if not logits.is_floating_point():
        raise AlgosError(f"logits has dtype {logits.dtype}; expected a floating dtype")
    if not 0.0 < temperature < float("inf"):
        raise AlgosError(
            f"temperature={temperature} must be above 0 and finite; greedy sampling has no log-probabilities"
        )
    return as_mask("loss_mask", loss_mask, "logits[..., 0]", logits[..., 0])


def checked_ids(logits: Tensor, token_ids: Tensor, mask: Tensor) -> Tensor:
    """int64, 0 outside the mask."""
    if token_ids.shape != logits.shape[:-1]:
        raise ShapeError(
            f"token_ids has shape {list(token_ids.shape)}, logits {list(logits.shape)}; expected [B, T], [B, T, V]"
        )
    if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise AlgosError(f"token_ids has dtype {token_ids.dtype}; expected integers")
    ids = token_ids.masked_fill(~mask, 0).long()
    is_outside = (ids < 0) | (ids >= logits.shape[-1])
    if (deferred := deferred_checks()) is not None:
        deferred.add(f"token_ids has ids outside of the vocabulary 0 ... {logits.shape[-1] - 1}", ~is_outside.any())
        return ids
    outside = is_outside.nonzero()
    if len(outside):
        index = tuple(outside[0].tolist())
        raise AlgosError(
            f"token_ids{list(index)}={ids[index].item()} is not in the vocabulary 0 ... {logits.shape[-1] - 1}; "
            "pass loss_mask where it is padding"
        )
    return ids


def check_rows(
    result: Tensor, mask: Tensor, ids: Tensor | None, logits_at: Callable[[tuple[int, ...]], Tensor]
) -> None:
    """Non-finite logits show in the result, so that the logits themselves need no pass of their own.

    Args:
        logits_at: the logits [V] at an index into `result`.
    """
    is_bad = ~torch.isfinite(result.detach()) & mask
    if (deferred := deferred_checks()) is not None:
        deferred.add("logits has rows that are not finite, or give the chosen token probability 0", ~is_bad.any())
        return
    bad = is_bad.nonzero()
    if not len(bad):
        return
    index = tuple(bad[0].tolist())
    row = logits_at(index)
    culprits = (torch.isnan(row) | (row == float("inf"))).nonzero()
    if len(culprits):
        column, reason = int(culprits[0]), "is not finite"
    elif ids is not None and bool(torch.isfinite(row).any()):
        column, reason = int(ids[index]), "gives the chosen token probability 0"
    else:
        column, reason = 0, "and so is every other token of the row"
    place = ", ".join(map(str, (*index, column)))
    raise NonFiniteError(
        f"logits[{place}]={row[column].item()} {reason} ({len(bad)} of {result.numel()} rows are affected)"
    )

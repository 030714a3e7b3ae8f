"""Log-probabilities and entropies of tokens, from logits of any precision, without a second copy of them.

A vocabulary of 151,936 makes the float32 log-softmax of 8 x 4,096 tokens 18.5 GiB. Here both passes walk over the rows
in chunks: the forward one keeps one number a row (the logsumexp), the backward one recomputes a chunk's softmax and
writes it into the gradient, which has the dtype of the logits. All arithmetic is float32 (float64 for float64 logits).

Logits of -inf (a banned token) are fine; a chosen token must not have one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlinf_algos.checks import as_mask
from rlinf_algos.errors import AlgosError, NonFiniteError, ShapeError

_CPU_CHUNK_ELEMENTS = 1 << 20
"""4 MiB of float32. Measured at V = 151,936, one core: 2^16 to 2^22 take the same time, 2^24 takes twice as long."""

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
    mask = _checked_mask(logits, temperature, loss_mask)
    if token_ids.shape != logits.shape[:-1]:
        raise ShapeError(
            f"token_ids has shape {list(token_ids.shape)}, logits {list(logits.shape)}; expected [B, T], [B, T, V]"
        )
    if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise AlgosError(f"token_ids has dtype {token_ids.dtype}; expected integers")
    ids = token_ids.masked_fill(~mask, 0).long()
    outside = ((ids < 0) | (ids >= logits.shape[-1])).nonzero()
    if len(outside):
        index = tuple(outside[0].tolist())
        raise AlgosError(
            f"token_ids{list(index)}={ids[index].item()} is not in the vocabulary 0 ... {logits.shape[-1] - 1}; "
            "pass loss_mask where it is padding"
        )
    result = _TokenLogprobs.apply(logits, ids, mask, float(temperature))
    _check_rows(result, logits, mask, ids)
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
    mask = _checked_mask(logits, temperature, loss_mask)
    result = _Entropy.apply(logits, mask, float(temperature))
    _check_rows(result, logits, mask, None)
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
        ids, mask = ids.reshape(-1), mask.reshape(-1)
        logsumexp = torch.empty(len(ids), dtype=_compute_dtype(logits), device=logits.device)
        result = torch.empty_like(logsumexp)
        for rows, scaled in _scaled_chunks(logits, temperature):
            logsumexp[rows] = scaled.logsumexp(dim=-1)
            result[rows] = scaled.gather(1, ids[rows, None]).squeeze(1) - logsumexp[rows]
        ctx.save_for_backward(logits, ids, mask, logsumexp)
        ctx.temperature = temperature
        return result.masked_fill_(~mask, 0.0).view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, ids, mask, logsumexp = ctx.saved_tensors
        grad = grad.reshape(-1) / ctx.temperature
        grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        flat = grad_logits.view(-1, logits.shape[-1])
        for rows, scaled in _scaled_chunks(logits, ctx.temperature):
            chunk = (scaled - logsumexp[rows, None]).exp_().mul_(-grad[rows, None])
            at_token = chunk.gather(1, ids[rows, None]) + grad[rows, None]
            chunk.scatter_(1, ids[rows, None], at_token)  # one target a row, so no atomic additions as in scatter_add_
            flat[rows] = chunk.masked_fill_(~mask[rows, None], 0.0).to(flat.dtype)
        return grad_logits, None, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
        mask = mask.reshape(-1)
        logsumexp = torch.empty(len(mask), dtype=_compute_dtype(logits), device=logits.device)
        result = torch.empty_like(logsumexp)
        for rows, scaled in _scaled_chunks(logits, temperature):
            logsumexp[rows] = scaled.logsumexp(dim=-1)
            probs, logprobs = _softmax(scaled, logsumexp[rows])
            result[rows] = -(probs * logprobs).sum(dim=-1)
        ctx.save_for_backward(logits, mask, logsumexp, result)
        ctx.temperature = temperature
        return result.masked_fill(~mask, 0.0).view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, mask, logsumexp, entropy = ctx.saved_tensors
        grad = grad.reshape(-1) / ctx.temperature
        grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        flat = grad_logits.view(-1, logits.shape[-1])
        for rows, scaled in _scaled_chunks(logits, ctx.temperature):
            probs, logprobs = _softmax(scaled, logsumexp[rows])
            chunk = probs.mul_(logprobs.add_(entropy[rows, None])).mul_(-grad[rows, None])
            flat[rows] = chunk.masked_fill_(~mask[rows, None], 0.0).to(flat.dtype)
        return grad_logits, None, None


def _softmax(scaled: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and their logarithms, with 0 for the logarithm of 0: `p log p` is 0 there."""
    logprobs = scaled - logsumexp[:, None]
    return logprobs.exp(), logprobs.masked_fill(logprobs == float("-inf"), 0.0)


def _scaled_chunks(logits: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Row ranges of the flattened [..., V] logits and those rows / temperature, in the dtype of the arithmetic."""
    num_elements = _CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    num_rows = max(1, num_elements // logits.shape[-1])
    start = 0
    for matrix in _matrices(logits.detach()):
        for chunk in matrix.split(num_rows):
            scaled = chunk.to(_compute_dtype(logits))
            yield slice(start, start + len(chunk)), scaled if temperature == 1.0 else scaled / temperature
            start += len(chunk)


def _matrices(logits: Tensor) -> Iterator[Tensor]:
    """[..., V] as views [n, V] in row order. `reshape` would copy a slice such as logits[:, :-1] whole."""
    if logits.ndim == 1:
        yield logits[None]
    elif logits.ndim == 2:
        yield logits
    elif logits.is_contiguous():
        yield logits.view(-1, logits.shape[-1])
    else:
        for part in logits:
            yield from _matrices(part)


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _checked_mask(logits: Tensor, temperature: float, loss_mask: Tensor | None) -> Tensor:
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ShapeError(f"logits has shape {list(logits.shape)}; expected [B, T, V] with at least one token in V")
    if not logits.is_floating_point():
        raise AlgosError(f"logits has dtype {logits.dtype}; expected a floating dtype")
    if not 0.0 < temperature < float("inf"):
        raise AlgosError(
            f"temperature={temperature} must be above 0 and finite; greedy sampling has no log-probabilities"
        )
    return as_mask("loss_mask", loss_mask, "logits[..., 0]", logits[..., 0])


def _check_rows(result: Tensor, logits: Tensor, mask: Tensor, ids: Tensor | None) -> None:
    """Non-finite logits show in the result, so that the logits themselves need no pass of their own."""
    bad = (~torch.isfinite(result.detach()) & mask).nonzero()
    if not len(bad):
        return
    index = tuple(bad[0].tolist())
    row = logits.detach()[index]
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

"""Log-probabilities among the tokens that top-p, top-k and min-p left.

Truncated sampling draws from `softmax(logits / temperature)` restricted to a set of tokens and normalised again. A
policy gradient on such samples needs the log-probability under that restricted distribution, with the set as the engine
had it: computed over all tokens, probabilities are too small and the gradient lowers tokens that could not be drawn
(DeepSeek-V3.2, arXiv:2512.02556, "Keep Sampling Mask").

The sets are small, so only the logits inside them are computed: S numbers, of all N tokens together, in place of N * V.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlinf_algos.errors import AlgosError, NonFiniteError, ShapeError
from rlinf_algos.logprobs import compute_dtype

_CHUNK_ELEMENTS = 1 << 22
"""Products of hidden states and head rows that exist at a time, 16 MiB of float32."""


def kept_logprobs_and_entropy(
    logits: Tensor, token_ids: Tensor, kept_ids: Tensor, num_kept: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of `softmax(logits / temperature)` among the kept tokens.

    Args:
        logits: [N, V], any floating dtype; logits[i] must be those that *predicted* token_ids[i].
        token_ids: [N] integers, each among its kept tokens.
        kept_ids: [S] integers in 0 ... V - 1, the kept tokens of the first token, then of the second, and so on.
        num_kept: [N] integers, at least 1, S in all.
        temperature: the one the tokens were sampled with, above 0.

    Returns:
        each [N] float32 (float64 for float64 logits), nats, differentiable.

    Raises:
        ShapeError: shapes do not fit. NonFiniteError: NaN or +inf among the kept logits, or -inf at the token.
        AlgosError: a token that is not among its kept ones or is there twice, a temperature not above 0.
    """
    rows = _rows(logits, token_ids, kept_ids, num_kept, temperature)
    kept_logits = logits[rows, kept_ids.long()].to(compute_dtype(logits))
    return _statistics(kept_logits, rows, token_ids, kept_ids, temperature)


def kept_head_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    kept_ids: Tensor,
    num_kept: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`kept_logprobs_and_entropy(hidden @ weight.T + bias, ...)` without the logits of other tokens.

    Args:
        hidden: [N, H], the states that predicted the tokens.
        weight: [V, H], the head.
        token_ids, kept_ids, num_kept, temperature: as in `kept_logprobs_and_entropy`.
        bias: [V]; None: there is none.
        softcap: logits become `softcap * tanh(logits / softcap)` before the temperature; None: they stay.

    Returns, raises: as `kept_logprobs_and_entropy`. Differentiable once in hidden and weight. Products and sums are
        float32 whatever the dtype of the states.
    """
    like = weight.detach()[:1, :1].expand(len(hidden), len(weight))  # has the shape of logits, and no memory
    rows = _rows(like, token_ids, kept_ids, num_kept, temperature)
    kept_logits = _KeptLogits.apply(hidden, weight, rows, kept_ids.long())
    if bias is not None:
        kept_logits = kept_logits + bias[kept_ids.long()]
    if softcap is not None:
        kept_logits = softcap * torch.tanh(kept_logits / softcap)
    return _statistics(kept_logits, rows, token_ids, kept_ids, temperature)


def _rows(logits: Tensor, token_ids: Tensor, kept_ids: Tensor, num_kept: Tensor, temperature: float) -> Tensor:
    """[S], which of the N tokens each kept one belongs to."""
    if logits.ndim != 2 or token_ids.shape != logits.shape[:1] or num_kept.shape != token_ids.shape:
        raise ShapeError(
            f"logits has shape {list(logits.shape)}, token_ids {list(token_ids.shape)}, num_kept "
            f"{list(num_kept.shape)}; expected [N, V], [N], [N]"
        )
    if kept_ids.ndim != 1 or len(kept_ids) != int(num_kept.sum()):
        raise ShapeError(f"kept_ids has shape {list(kept_ids.shape)}; num_kept says {int(num_kept.sum())} in all")
    if not 0.0 < temperature < float("inf"):
        raise AlgosError(f"temperature={temperature} must be above 0 and finite")
    outside = (kept_ids < 0) | (kept_ids >= logits.shape[1])
    if bool(outside.any()):
        raise AlgosError(f"kept_ids has {int(kept_ids[outside][0])}; the vocabulary is 0 ... {logits.shape[1] - 1}")
    return torch.repeat_interleave(num_kept.long(), output_size=len(kept_ids))


def _statistics(
    kept_logits: Tensor, rows: Tensor, token_ids: Tensor, kept_ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """
    Args:
        kept_logits: [S]
    """
    num_tokens = len(token_ids)
    is_token = kept_ids == token_ids[rows]
    counts = is_token.new_zeros(num_tokens, dtype=torch.int64).index_add_(0, rows, is_token.long())
    if bool((counts != 1).any()):
        number = int((counts != 1).nonzero()[0])
        raise AlgosError(
            f"token_ids[{number}]={int(token_ids[number])} is {int(counts[number])} times among the tokens that "
            "sampling left; an engine draws one of them"
        )
    scores = kept_logits / temperature
    zeros = scores.new_zeros(num_tokens)
    largest = torch.full_like(zeros, float("-inf")).scatter_reduce(0, rows, scores.detach(), "amax")
    shifted = scores - largest[rows]
    powers = shifted.exp()
    log_total = zeros.index_add(0, rows, powers).log()
    logprobs = zeros.index_add(0, rows[is_token], shifted[is_token]) - log_total
    if not bool(torch.isfinite(logprobs.detach()).all()):
        number = int((~torch.isfinite(logprobs.detach())).nonzero()[0])
        raise NonFiniteError(f"the kept logits of token {number} give a log-probability of {float(logprobs[number])}")
    terms = powers / log_total.exp()[rows] * shifted.clamp(min=-1e4)  # p log p is 0 where p is
    return logprobs, log_total - zeros.index_add(0, rows, terms)


class _KeptLogits(torch.autograd.Function):
    """`(hidden[rows] * weight[ids]).sum(-1)`, [S], in chunks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, rows, ids)
        dtype = compute_dtype(hidden)
        parts = [
            torch.einsum("sh,sh->s", hidden[some_rows].to(dtype), weight[some_ids].to(dtype))
            for some_rows, some_ids in _chunks(hidden, rows, ids)
        ]
        return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, rows, ids = ctx.saved_tensors
        (grad,) = grads
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        of_hidden = torch.zeros_like(hidden, dtype=grad.dtype) if needs_hidden else None
        of_weight = torch.zeros_like(weight, dtype=grad.dtype) if needs_weight else None
        size = _chunk_size(hidden)
        for (some_rows, some_ids), slope in zip(_chunks(hidden, rows, ids), grad[:, None].split(size), strict=True):
            if of_hidden is not None:
                of_hidden.index_add_(0, some_rows, slope * weight[some_ids].to(grad.dtype))
            if of_weight is not None:
                of_weight.index_add_(0, some_ids, slope * hidden[some_rows].to(grad.dtype))
        return (
            None if of_hidden is None else of_hidden.to(hidden.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
            None,
        )


def _chunk_size(hidden: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // hidden.shape[1])


def _chunks(hidden: Tensor, rows: Tensor, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    if not len(rows):
        return []
    size = _chunk_size(hidden)
    return list(zip(rows.split(size), ids.split(size), strict=True))

"""Log-probabilities and entropies of tokens from hidden states and a language model's head, without full logits.

8,192 tokens over a vocabulary of 151,936 have 4.6 GiB of float32 logits, of which the plain formula holds several
copies. Here at most one tile of tokens and vocabulary columns exists at a time. The forward pass keeps a running
maximum and running sums per token (online softmax: Milakov and Gimelshein, arXiv:1805.02867); the backward pass
recomputes each tile, turns it into its gradient, and adds that to the gradients of the hidden states and of the head.
That costs a fourth matrix product where the plain formula has three; tiles within `kept_bytes` are kept instead.
`rlinf_algos.logprobs` starts from logits.

Products have the dtype of the hidden states, as the head itself has; everything else is float32 (float64 for float64).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlinf_algos.checks import deferred_checks
from rlinf_algos.errors import AlgosError, ShapeError
from rlinf_algos.logprobs import LEAST_LOGPROB, check_rows, checked_ids, checked_mask, compute_dtype

_MAX_TILE_ROWS = 8192
_CPU_TILE_ELEMENTS = 1 << 24
"""64 MiB of float32: products of this size run at the full rate of a core."""
_DEVICE_TILE_ELEMENTS = 1 << 26
"""256 MiB of float32: on a GPU each tile costs a handful of kernel launches."""


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    loss_mask: Tensor | None = None,
    kept_bytes: int = 0,
) -> Tensor:
    """`token_logprobs(hidden @ weight.T + bias, token_ids, temperature)`.

    Args:
        hidden: [B, T, H], or any [..., H]; hidden[b, t] must be the state that *predicted* token_ids[b, t].
        weight: [V, H], of the dtype of `hidden`.
        token_ids: [B, T] integers in 0 ... V - 1.
        temperature: the one the tokens were sampled with, above 0.
        bias: [V]; None: there is none.
        softcap: logits become `softcap * tanh(logits / softcap)` before the temperature (Gemma 2); None: they stay.
        loss_mask: [B, T], bool or 0/1; positions outside give 0.0 and no gradient, and cost nothing. None: all.
        kept_bytes: logits of the forward pass up to so many bytes are kept for the backward one.

    Returns:
        [B, T] float32 (float64 for float64 states), nats, differentiable once in hidden, weight and bias.

    Raises:
        ShapeError: shapes do not fit. NonFiniteError: NaN or +inf among a token's logits, or -inf at the token.
        AlgosError: a token id out of range, a temperature or cap not above 0, two dtypes.
    """
    return _statistics(hidden, weight, token_ids, temperature, bias, softcap, loss_mask, kept_bytes, False)[0]


def head_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    loss_mask: Tensor | None = None,
    kept_bytes: int = 0,
) -> tuple[Tensor, Tensor]:
    """`head_logprobs`, and the entropies of the same distributions, in one pass.

    Args, raises: as `head_logprobs`.

    Returns:
        log-probabilities and entropies, each as those of `head_logprobs`.
    """
    logprobs, entropies = _statistics(
        hidden, weight, token_ids, temperature, bias, softcap, loss_mask, kept_bytes, True
    )
    return logprobs, entropies


def _statistics(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float,
    bias: Tensor | None,
    softcap: float | None,
    loss_mask: Tensor | None,
    kept_bytes: int,
    wants_entropy: bool,
) -> tuple[Tensor, ...]:
    """Computes the tokens inside the mask; zeros elsewhere."""
    _check_head(hidden, weight, bias, softcap)
    like = weight.detach()[:1, :1].expand(*hidden.shape[:-1], len(weight))  # has the shape of logits, and no memory
    mask = checked_mask(like, temperature, loss_mask)
    ids = checked_ids(like, token_ids, mask)
    is_whole = loss_mask is None or bool(mask.all())
    rows = hidden.reshape(-1, hidden.shape[-1]) if is_whole else hidden[mask]
    budget = kept_bytes if torch.is_grad_enabled() else 0
    flat_statistics = _HeadStatistics.apply(
        rows.contiguous(),
        weight,
        bias,
        ids.flatten() if is_whole else ids[mask],
        float(temperature),
        softcap,
        wants_entropy,
        budget,
    )
    if is_whole:
        results = tuple(flat.view(mask.shape) for flat in flat_statistics)
    else:
        results = tuple(flat.new_zeros(mask.shape).masked_scatter(mask, flat) for flat in flat_statistics)

    @torch.no_grad()
    def logits_at(index: tuple[int, ...]) -> Tensor:
        logits = torch.nn.functional.linear(hidden[index], weight, bias)
        return _capped(logits.to(results[0].dtype), softcap)

    check_rows(results[0], mask, ids, logits_at)
    return results


class _HeadStatistics(torch.autograd.Function):
    """Log-probabilities, and entropies if they are wanted, of [N, H] states."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        softcap: float | None,
        wants_entropy: bool,
        kept_bytes: int,
    ) -> tuple[Tensor, ...]:
        tiles = _Tiles(hidden, weight, bias, temperature, softcap, num_tokens=len(hidden))
        options: Any = {"dtype": tiles.dtype, "device": hidden.device}
        largest = torch.full((len(hidden),), torch.finfo(tiles.dtype).min, **options)
        at_token, total, weighted = (torch.zeros(len(hidden), **options) for _ in range(3))
        products = tiles.room_to_keep(kept_bytes if any(ctx.needs_input_grad[:3]) else 0)
        for number, columns in enumerate(tiles.columns()):
            for rows in tiles.rows():
                raw = tiles.product(rows, columns, out=products[number][rows] if number < len(products) else None)
                scores = tiles.scores(raw)
                token, is_here = _places_of(ids[rows], columns)
                at_token[rows] = torch.where(is_here, scores.gather(1, token).squeeze(1), at_token[rows])
                before, sums = largest[rows], total[rows]
                now = torch.maximum(before, scores.amax(1))
                shrink = torch.exp(before - now)
                shifted = scores.sub_(now[:, None])
                powers = torch.exp(shifted, out=tiles.buffer(1, scores) if wants_entropy else shifted)
                sum_of_powers = sums * shrink + powers.sum(1)
                if wants_entropy:  # the sum of exp(x - max) (x - max), of all columns so far
                    earlier = shrink * (weighted[rows] + sums * (before - now))
                    weighted[rows] = earlier + powers.mul_(shifted.clamp_(min=LEAST_LOGPROB)).sum(1)
                largest[rows], total[rows] = now, sum_of_powers
        log_total = total.log()
        logprobs = at_token - largest - log_total
        entropies = log_total - weighted / total if wants_entropy else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, ids, largest + log_total, entropies, *products)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.may_read = deferred_checks() is None
        """Whether the backward pass may wait for the device, to leave out tokens without gradient."""
        return (logprobs,) if entropies is None else (logprobs, entropies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, ids, logsumexp, entropies, *products = ctx.saved_tensors
        num_tokens, needs = len(hidden), ctx.needs_input_grad
        slope, of_entropies = (
            torch.zeros_like(logsumexp) if grad is None else grad / ctx.temperature for grad in (*grads, None)[:2]
        )
        may_read = ctx.may_read
        has_entropies = bool((of_entropies != 0).any()) if may_read else entropies is not None
        offset = slope if entropies is None else slope + of_entropies * entropies
        active = ((slope != 0) | (of_entropies != 0)).nonzero().squeeze(1) if may_read else slope
        is_whole = len(active) == num_tokens
        if not is_whole:  # a token without gradient costs nothing
            hidden, ids, logsumexp, slope, of_entropies, offset = (
                tensor[active] for tensor in (hidden, ids, logsumexp, slope, of_entropies, offset)
            )
        tiles = _Tiles(hidden, weight, bias, ctx.temperature, ctx.softcap, num_tokens=num_tokens)
        of_hidden = torch.zeros_like(hidden, dtype=tiles.dtype) if needs[0] else None
        of_weight = torch.zeros_like(weight) if needs[1] else None
        of_bias = logsumexp.new_zeros(len(weight)) if needs[2] else None
        for number, columns in enumerate(tiles.columns()):
            for rows in tiles.rows():
                if number < len(products):
                    raw = products[number][rows if is_whole else active[rows]]
                else:
                    raw = tiles.product(rows, columns)
                scores = tiles.scores(raw)
                slope_of_cap = tiles.slope_of_cap(scores)
                log_probs = scores.sub_(logsumexp[rows, None])
                gradient = torch.exp(log_probs, out=tiles.buffer(1, scores) if has_entropies else log_probs)
                if has_entropies:  # p * (-slope - of_entropies * (log p + H))
                    gradient.mul_(
                        log_probs.clamp_(min=LEAST_LOGPROB).mul_(-of_entropies[rows, None]).sub_(offset[rows, None])
                    )
                else:
                    gradient.mul_(-slope[rows, None])
                token, is_here = _places_of(ids[rows], columns)
                at_token = torch.where(is_here, slope[rows], 0.0)[:, None]
                gradient.scatter_(1, token, gradient.gather(1, token) + at_token)
                if slope_of_cap is not None:
                    gradient.mul_(slope_of_cap)
                if of_bias is not None:
                    of_bias[columns] += gradient.sum(0)
                factor = tiles.as_operand(gradient)
                if of_hidden is not None:
                    tiles.add_product(of_hidden[rows], factor, weight[columns])
                if of_weight is not None:
                    tiles.add_columns(of_weight[columns], factor.t(), rows)
        if of_hidden is not None:
            of_hidden = of_hidden.to(hidden.dtype)
            if not is_whole:
                of_hidden = hidden.new_zeros(num_tokens, hidden.shape[1]).index_copy_(0, active, of_hidden)
        if of_bias is not None and bias is not None:
            of_bias = of_bias.to(bias.dtype)
        return of_hidden, of_weight, of_bias, None, None, None, None, None


class _Tiles:
    """The logits [N, V] in tiles of rows and columns, each in buffers that the next tile uses again: fresh memory would
    cost page faults."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        softcap: float | None,
        *,
        num_tokens: int,
    ) -> None:
        """
        Args:
            hidden: [n, H]; the backward pass may leave tokens out.
            num_tokens: those of the forward pass, which decide the width of a tile.
        """
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._temperature, self._softcap = temperature, softcap
        self.dtype = compute_dtype(hidden)
        elements = _CPU_TILE_ELEMENTS if hidden.device.type == "cpu" else _DEVICE_TILE_ELEMENTS
        self._num_rows = min(_MAX_TILE_ROWS, max(1, num_tokens))
        self._num_columns = min(len(weight), max(1, elements // max(self._num_rows, hidden.shape[1])))
        self._num_tokens = num_tokens
        self._buffers: dict[int, Tensor] = {}

    def rows(self) -> list[slice]:
        """In order; all of them for each range of columns."""
        return _slices(len(self._hidden), self._num_rows)

    def columns(self) -> list[slice]:
        """In order; the same in both passes."""
        return _slices(len(self._weight), self._num_columns)

    def room_to_keep(self, num_bytes: int) -> list[Tensor]:
        """Places for the products of the first columns, as many as fit."""
        rooms: list[Tensor] = []
        for columns in self.columns():
            width = columns.stop - columns.start
            num_bytes -= self._num_tokens * width * self._hidden.element_size()
            if num_bytes < 0:
                break
            rooms.append(self._hidden.new_empty(self._num_tokens, width))
        return rooms

    def product(self, rows: slice, columns: slice, out: Tensor | None = None) -> Tensor:
        """The head's output for a tile, in the dtype of the hidden states."""
        hidden, weight = self._hidden[rows], self._weight[columns]
        if out is None:
            number = 0 if self.dtype == hidden.dtype else -1
            out = self._view(number, hidden.dtype, len(hidden), len(weight))
        if self._bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(self._bias[columns], hidden, weight.t(), out=out)

    def scores(self, raw: Tensor) -> Tensor:
        """What the softmax is taken of; in buffer 0."""
        scores = self._view(0, self.dtype, *raw.shape)
        if scores.data_ptr() != raw.data_ptr():
            scores.copy_(raw)
        scores = _capped(scores, self._softcap)
        return scores if self._temperature == 1.0 else scores.div_(self._temperature)

    def slope_of_cap(self, scores: Tensor) -> Tensor | None:
        """Derivative of the capped logits in the logits, 1 - tanh^2; in buffer 2."""
        if self._softcap is None:
            return None
        tanh = torch.mul(scores, self._temperature / self._softcap, out=self.buffer(2, scores))
        return tanh.square_().neg_().add_(1.0)

    def buffer(self, number: int, like: Tensor) -> Tensor:
        return self._view(number, self.dtype, *like.shape)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Adds left @ right to `total`, which has the dtype of the arithmetic."""
        if total.dtype == left.dtype:
            total.addmm_(left, right)
        else:
            total.add_(torch.mm(left, right, out=self._view(-2, left.dtype, *total.shape)))

    def add_columns(self, result: Tensor, factor: Tensor, rows: slice) -> None:
        """Adds a tile's part to the gradient of some columns' weights; the last rows write it down."""
        states = self._hidden[rows]
        if len(states) == len(self._hidden):
            torch.mm(factor, states, out=result)
            return
        total = self._view(3, self.dtype, *result.shape)
        if rows.start == 0:
            total.zero_()
        self.add_product(total, factor, states)
        if rows.stop == len(self._hidden):
            result.copy_(total)

    def as_operand(self, gradient: Tensor) -> Tensor:
        """In the dtype of the hidden states."""
        if gradient.dtype == self._hidden.dtype:
            return gradient
        return self._view(-1, self._hidden.dtype, *gradient.shape).copy_(gradient)

    def _view(self, number: int, dtype: torch.dtype, num_rows: int, num_columns: int) -> Tensor:
        """[num_rows, num_columns] of a buffer; those with a number below 0 have the dtype of the hidden states."""
        size = num_rows * num_columns
        if number not in self._buffers or len(self._buffers[number]) < size:
            self._buffers[number] = torch.empty(size, dtype=dtype, device=self._hidden.device)
        return self._buffers[number][:size].view(num_rows, num_columns)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _places_of(ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """[n, 1] where in the columns each id is, and [n] whether it is; some place where it is not."""
    here = (ids >= columns.start) & (ids < columns.stop)
    return (ids - columns.start).clamp_(0, columns.stop - columns.start - 1)[:, None], here


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """In place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> None:
    if weight.ndim != 2 or hidden.ndim == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"hidden has shape {list(hidden.shape)}, weight {list(weight.shape)}; expected [B, T, H], [V, H]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias has shape {list(bias.shape)}, weight {list(weight.shape)}; expected [V], [V, H]")
    dtypes = {"hidden": hidden.dtype, "weight": weight.dtype} | ({} if bias is None else {"bias": bias.dtype})
    if len(set(dtypes.values())) > 1:
        raise AlgosError(f"{', '.join(f'{name} is {dtype}' for name, dtype in dtypes.items())}; cast them to one dtype")
    if softcap is not None and not 0.0 < softcap < float("inf"):
        raise AlgosError(f"softcap={softcap} must be above 0 and finite; None leaves the logits as they are")

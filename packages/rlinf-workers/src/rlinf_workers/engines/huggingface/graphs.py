"""Decoding with a static cache: one step of the model, captured in a CUDA graph and replayed for each token.

In eager mode a GPU waits for the host, which launches a thousand small kernels per token; a replayed graph launches
them at once. For that, nothing in a step may depend on the host: keys and values lie in tensors of a fixed size, the
position of the next token is a number on the device, and the host checks only every `CHECK_EVERY` tokens whether all
rows have ended.

A graph is captured for a number of rows and a number of keys. Both are rounded up (`bucket`), so that short contexts do
not attend at the length of the longest, and few graphs are captured. When half of the rows have ended, the running ones
are compacted and continue alone. Graphs read the weights in place: weights that are filled in place leave them valid;
if weights have moved, graphs are captured again.

Legend: P prompts, G completions of each, R rows (P * G, rounded up), L prompt width, T new tokens, K keys.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, Cache, DynamicCache

from rlinf_workers.engines.huggingface.masks import StepPlaces, step_masks
from rlinf_workers.engines.sampling import SamplingSettings, sample_by_blocks
from rlinf_workers.engines.stopping import StopStrings
from rlinf_workers.errors import WorkersError
from rlinf_workers.models.cache_argument import as_cache
from rlinf_workers.models.packed_attention import decoder_attention
from rlinf_workers.models.pictures import rope_offsets
from rlinf_workers.roles.records.language import Prompt

_LOG = logging.getLogger(__name__)
CHECK_EVERY = 16
"""Tokens between two checks whether all rows have ended: each check synchronizes with the device, and at most this many
tokens are computed in vain."""
PREFILL_TOKENS = 16384
"""Prompt tokens per forward pass (at least one prompt), to bound the memory of the prefill."""
FIRST_DRAWS = 128
"""Rows whose first tokens are sampled at once (at least one prompt's rows)."""
FEWEST_ROWS = 8
FEWEST_KEYS = 64
"""Keys come in multiples of 16, otherwise SDPA's memory-efficient kernel copies the mask for each layer."""
ATTENTION = "rlinf_one_query"
CACHE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
"""transformers' cache layers with one key and one value per token and nothing else."""

Prefill = Callable[[Sequence[Prompt], Tensor, Tensor, Any], Tensor]
"""Writes N prompts, whose token ids and mask are [N, L], into a cache; returns the logits of the last position,
[N, V]."""
Generated = tuple[Tensor, Tensor, Tensor, Tensor]
"""Token ids, log-probabilities and mask, each [P * G, T], and which completions were truncated, [P * G]."""


class NotCapturableError(Exception):
    """A step synchronizes with the host, so it cannot be captured."""


def bucket(size: int, least: int) -> int:
    """Rounds up to one of least * (1, 1.5, 2, 3, 4, 6, 8, ...), so at most a third is idle.

    Example: bucket(129, 64) = 192, bucket(5, 8) = 8.
    """
    power = least
    while power < size:
        power *= 2
    smaller = power // 4 * 3
    return smaller if least < smaller and size <= smaller else power


def why_not(model: Any) -> str | None:
    """Why a model cannot be decoded with a static cache; None: it can."""
    if (attention := model.config._attn_implementation) != "sdpa":
        return f"its attention is {attention!r}, not 'sdpa'"
    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - CACHE_LAYERS
    return f"its cache has layers of other kinds ({', '.join(sorted(kinds))})" if kinds else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """The key of a captured graph."""

    num_rows: int
    num_keys: int
    sampling: SamplingSettings
    """Without group size, length and stop strings, which do not affect a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Buffers:
    """Inputs and outputs of a step, at fixed addresses."""

    keys: tuple[Tensor, ...]
    """[R, heads, K, size] per layer; left-padded prompts, followed by one position per new token."""
    values: tuple[Tensor, ...]
    bias: Tensor
    """[R, 1, 1, K] in the model's dtype; added to attention scores: 0, or -inf where there is no token yet."""
    slot: Tensor
    """[1] int64, the position of `tokens` among the keys."""
    time: Tensor
    """[1] int64, the column of `token_ids` to sample next."""
    tokens: Tensor
    """[R] int64, sampled last."""
    positions: Tensor
    """[R] int64, of `tokens`"""
    running: Tensor
    """[R] bool, the row has not ended."""
    noise: Tensor
    """[R, T] float32"""
    token_ids: Tensor
    """[R, T] int64"""
    logprobs: Tensor
    """[R, T] float32"""
    loss_mask: Tensor
    """[R, T] float32"""
    row: Tensor
    """[R] int64, index of the row in the batch."""

    def move_up(self, num_rows: int, fewer: int) -> None:
        """Reorders the first `num_rows` rows so that the running ones are among the first `fewer`. The others lose
        their keys and values."""
        order = (~self.running[:num_rows]).byte().argsort(stable=True)
        for tensor in (*self.keys, *self.values, self.bias):
            tensor[:fewer] = tensor[order[:fewer]]
        of_rows = (self.tokens, self.positions, self.running, self.row)
        for tensor in (*of_rows, self.noise, self.token_ids, self.logprobs, self.loss_mask):
            tensor[:num_rows] = tensor[order]


class FixedDecoder:
    """Generates batches of prompts of one width, one batch after the other.

    Args:
        model: a model for which `why_not` returns None.
        prefill: writes prompts into a DynamicCache.
        stop_ids: [S] int64, tokens that end a row.
        captures: False: compute each step without CUDA graphs, on any device.
    """

    def __init__(
        self, model: Any, prefill: Prefill, device: torch.device, *, stop_ids: Tensor, pad_id: int, captures: bool
    ) -> None:
        self._model, self._prefill, self._device = model, prefill, device
        self._stop_ids, self._pad_id = stop_ids, pad_id
        self._captures = captures
        self._norms = tuple(norm for norm in model.modules() if _is_plain_norm(norm))
        self._buffers: _Buffers | None = None
        self._graphs: dict[_Step, torch.cuda.CUDAGraph] = {}
        self._addresses: tuple[int, ...] = ()
        self._pool: Any = None
        AttentionInterface.register(ATTENTION, one_query)

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    def release(self) -> None:
        """Frees graphs, caches and their memory."""
        if self._buffers is None:
            return
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._buffers = self._pool = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        noise: Tensor,
        settings: SamplingSettings,
        stops: StopStrings | None = None,
    ) -> Generated:
        """Samples G completions of each prompt.

        Args:
            prompt_ids, prompt_mask: [P, L], those of the prompts, padded on the left.
            noise: [P * G, T]
            stops: stop strings of the settings, checked every `CHECK_EVERY` tokens; tokens sampled after one are
                dropped.
        """
        (num_rows, num_tokens), width = noise.shape, prompt_ids.shape[1]
        rows = bucket(num_rows, FEWEST_ROWS)
        self._release_if_weights_moved()
        of_step = replace(settings, group_size=1, max_new_tokens=1, stop=())
        buffers = self._begin(prompts, prompt_ids, prompt_mask, noise, settings)
        for t in range(1, num_tokens):
            if t % CHECK_EVERY == 0:
                self._cut_at_stops(buffers, rows, stops, begun=t - CHECK_EVERY)
                num_running = int(buffers.running[:rows].sum())
                if num_running == 0:
                    break
                if (fewer := bucket(num_running, FEWEST_ROWS)) <= rows // 2:
                    buffers.move_up(rows, fewer)
                    rows = fewer
            num_keys = min(bucket(width + t, FEWEST_KEYS), buffers.bias.shape[-1])
            self._advance(_Step(num_rows=rows, num_keys=num_keys, sampling=of_step))
        self._cut_at_stops(buffers, rows, stops, begun=(num_tokens - 1) // CHECK_EVERY * CHECK_EVERY)
        order = buffers.row.argsort()[:num_rows]
        tensors = (buffers.token_ids, buffers.logprobs, buffers.loss_mask)
        token_ids, logprobs, loss_mask = (tensor[order, :num_tokens] for tensor in tensors)
        return token_ids, logprobs, loss_mask, buffers.running[order]

    def _cut_at_stops(self, buffers: _Buffers, rows: int, stops: StopStrings | None, *, begun: int) -> None:
        """Truncates rows after the first stop string that they completed after their first `begun` tokens."""
        if stops is None:
            return
        lengths = buffers.loss_mask[:rows].sum(1).long().tolist()
        texts = buffers.token_ids[:rows].tolist()
        for row, (token_ids, length) in enumerate(zip(texts, lengths, strict=True)):
            if length > begun and (end := stops.end(token_ids[:length], begun=begun)) is not None:
                buffers.token_ids[row, end:] = self._pad_id
                buffers.logprobs[row, end:] = buffers.loss_mask[row, end:] = 0.0
                buffers.running[row] = False

    def _release_if_weights_moved(self) -> None:
        """A graph would read the old addresses."""
        addresses = tuple(tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers()))
        if addresses != self._addresses:
            self.release()
        self._addresses = addresses

    def _begin(
        self,
        prompts: Sequence[Prompt],
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        noise: Tensor,
        settings: SamplingSettings,
    ) -> _Buffers:
        """Fills the buffers with a batch: prompts in the caches, and the first sampled tokens."""
        (num_rows, num_tokens), (num_prompts, width) = noise.shape, prompt_ids.shape
        size, rows = settings.group_size, bucket(num_rows, FEWEST_ROWS)
        buffers, at_once = None, max(1, PREFILL_TOKENS // width)
        for first in range(0, num_prompts, at_once):
            chunk = slice(first, first + at_once)
            cache = DynamicCache()  # without the config: it keeps all keys of layers with a window, too
            logits = self._prefill(prompts[chunk], prompt_ids[chunk], prompt_mask[chunk], cache)
            if buffers is None:
                buffers = self._reserve(rows, width + num_tokens, num_tokens, cache, logits.dtype)
                self._reset(buffers, prompt_mask, noise, size)
                if (offsets := rope_offsets([prompt.pictures for prompt in prompts])) is not None:
                    buffers.positions[:num_rows] += offsets.repeat_interleave(size).to(self._device)
            self._place(buffers, first * size, cache, size)
            at = first * size
            for some in logits.split(max(1, FIRST_DRAWS // size)):
                self._draw(buffers, slice(at, at + len(some) * size), some.repeat_interleave(size, 0), settings)
                at += len(some) * size
        assert buffers is not None, "a batch has at least one prompt"
        buffers.time.add_(1)
        return buffers

    def _place(self, buffers: _Buffers, first_row: int, cache: Any, size: int) -> None:
        """Copies keys and values of prompts into the rows of their completions."""
        for places, name in ((buffers.keys, "keys"), (buffers.values, "values")):
            for place, layer in zip(places, cache.layers, strict=True):
                rows = getattr(layer, name).repeat_interleave(size, 0)
                place[first_row : first_row + len(rows), :, : rows.shape[2]] = rows

    def _reserve(self, rows: int, num_keys: int, num_tokens: int, cache: Any, dtype: torch.dtype) -> _Buffers:
        """Buffers that hold a batch: the existing ones, or new ones, for which no graph has been captured."""
        num_keys = -(-num_keys // FEWEST_KEYS) * FEWEST_KEYS
        if (there := self._buffers) is not None:
            if rows <= len(there.tokens) and num_keys <= there.bias.shape[-1] and num_tokens <= there.noise.shape[1]:
                return there
            rows, num_keys = max(rows, len(there.tokens)), max(num_keys, there.bias.shape[-1])
            num_tokens = max(num_tokens, there.noise.shape[1])
            del there
            self.release()

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        def places(like: Tensor) -> Tensor:
            return zeros(rows, like.shape[1], num_keys, like.shape[3], dtype=like.dtype)

        self._buffers = _Buffers(
            keys=tuple(places(layer.keys) for layer in cache.layers),
            values=tuple(places(layer.values) for layer in cache.layers),
            bias=zeros(rows, 1, 1, num_keys, dtype=dtype),
            slot=zeros(1),
            time=zeros(1),
            tokens=zeros(rows),
            positions=zeros(rows),
            running=zeros(rows, dtype=torch.bool),
            noise=zeros(rows, num_tokens, dtype=torch.float32),
            token_ids=zeros(rows, num_tokens),
            logprobs=zeros(rows, num_tokens, dtype=torch.float32),
            loss_mask=zeros(rows, num_tokens, dtype=torch.float32),
            row=zeros(rows),
        )
        return self._buffers

    def _reset(self, buffers: _Buffers, prompt_mask: Tensor, noise: Tensor, size: int) -> None:
        """Resets buffers to the state before the first token; rows past the batch have ended, and attend only to
        themselves."""
        mask = prompt_mask.repeat_interleave(size, 0)
        (num_rows, num_tokens), width = noise.shape, mask.shape[1]
        buffers.bias.fill_(-torch.inf)[:num_rows, 0, 0, :width].masked_fill_(mask.bool(), 0.0)
        buffers.slot.fill_(width)
        buffers.time.zero_()
        buffers.positions.zero_()[:num_rows] = mask.sum(1)
        buffers.running.fill_(False)[:num_rows] = True
        buffers.noise.zero_()[:num_rows, :num_tokens] = noise
        buffers.token_ids.fill_(self._pad_id)
        buffers.logprobs.zero_()
        buffers.loss_mask.zero_()
        torch.arange(len(buffers.row), out=buffers.row)

    def _advance(self, step: _Step) -> None:
        """Computes one more token. A step runs once before capture, because libraries initialize on the first call."""
        if (graph := self._graphs.get(step)) is not None:
            graph.replay()
        elif not self._captures:
            self._run(step)
        else:
            try:
                with _WithoutTheHost():
                    self._run(step)
            except NotCapturableError as error:
                self._stop_capturing(error)
                return self._run(step)
            try:
                self._graphs[step] = self._capture(step)
            except NotCapturableError as error:
                self._stop_capturing(error)

    def _stop_capturing(self, reason: NotCapturableError) -> None:
        _LOG.warning("decoding without CUDA graphs, because %s", reason)
        self._captures = False

    def _capture(self, step: _Step) -> torch.cuda.CUDAGraph:
        """Captures a graph of the step without running it.

        Raises: NotCapturableError if torch refuses an operation; WorkersError if CUDA does, because torch's allocator
        does not recover from that (pytorch#180395). `_WithoutTheHost` detects most cases before.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
        torch.cuda.empty_cache()  # otherwise memory of the step's first run stays allocated beside the graph's
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        refused = None
        with torch.cuda.stream(stream):
            graph.capture_begin(
                pool=self._pool, capture_error_mode="thread_local"
            )  # weight syncs copy in other threads
            try:
                self._run(step)
            except RuntimeError as error:
                refused = error
            try:
                graph.capture_end()
            except RuntimeError as error:
                raise WorkersError(
                    f"a decoding step of {type(self._model).__name__} cannot be captured in a CUDA graph: "
                    f"{refused or error}; set rollout.engine_options.cuda_graphs=false"
                ) from (refused or error)
        if refused is not None:
            graph.reset()
            raise NotCapturableError(f"torch refused a step of the model: {refused}")
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return graph

    def _run(self, step: _Step) -> None:
        """Runs the model on `tokens` and samples the next ones. It can be restarted until sampling begins."""
        assert self._buffers is not None, "reserved by _begin"
        buffers, rows = self._buffers, slice(0, step.num_rows)
        buffers.bias.index_fill_(3, buffers.slot, 0.0)
        for norm in self._norms:
            norm.forward = partial(_norm, norm)
        bias = buffers.bias[rows, ..., : step.num_keys]
        places = StepPlaces(queries=buffers.slot, num_keys=step.num_keys, bias=bias)
        try:
            with decoder_attention(self._model, ATTENTION), step_masks(ATTENTION, places):
                output = self._model(
                    input_ids=buffers.tokens[rows, None],
                    position_ids=buffers.positions[rows, None],
                    attention_mask=bias[:, 0, 0] == 0,
                    **as_cache(_FixedCache(buffers, step)),
                    use_cache=True,
                    logits_to_keep=1,
                )
        finally:
            for norm in self._norms:
                del norm.forward
        self._draw(buffers, rows, output.logits[:, -1], step.sampling)
        buffers.positions.add_(1)
        buffers.slot.add_(1)
        buffers.time.add_(1)

    def _draw(self, buffers: _Buffers, rows: slice, logits: Tensor, settings: SamplingSettings) -> None:
        """Samples tokens for some rows and writes them into their column."""
        running, time = buffers.running[rows], buffers.time
        tokens, logprobs = sample_by_blocks(logits, buffers.noise[rows].index_select(1, time)[:, 0], settings)
        ended = ~running  # not `torch.where`, which copies its scalar from the host
        tokens = tokens.masked_fill_(ended, self._pad_id)
        buffers.tokens[rows] = tokens
        buffers.token_ids[rows].index_copy_(1, time, tokens[:, None])
        buffers.logprobs[rows].index_copy_(1, time, logprobs.masked_fill_(ended, 0.0)[:, None])
        buffers.loss_mask[rows].index_copy_(1, time, running[:, None].float())
        running.logical_and_((tokens[:, None] != self._stop_ids).all(1))


class _FixedCache(Cache):
    """Presents the buffers as a transformers cache, limited to the keys of a step."""

    def __init__(self, buffers: _Buffers, step: _Step) -> None:
        super().__init__(layers=[])
        self._buffers, self._step = buffers, step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        buffers, step = self._buffers, self._step
        keys, values = (layers[layer_idx][: step.num_rows] for layers in (buffers.keys, buffers.values))
        keys.index_copy_(2, buffers.slot, key_states)
        values.index_copy_(2, buffers.slot, value_states)
        return keys[:, :, : step.num_keys], values[:, :, : step.num_keys]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """transformers uses this for positions, which are passed explicitly; the host does not know the length."""
        return 0


def one_query(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one query per row, [R, heads, 1, size], in the signature that transformers expects.

    Heads that share keys and values are computed as queries of one head, so keys and values are not repeated.
    """
    shared = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    output = scaled_dot_product_attention(shared, key, value, attention_mask, scale=options.get("scaling"))
    return output.reshape(len(query), 1, query.shape[1], value.shape[-1]), None


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    """The norm in one kernel, rounded once; transformers launches eight, a third of the time of a small step."""
    return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


@torch.no_grad()
def _is_plain_norm(module: Any) -> bool:
    """Whether a module computes what `_norm` does, judged by its attributes and verified on an example."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return False
    if list(inspect.signature(module.forward).parameters) != ["hidden_states"]:
        return False
    example = torch.linspace(-2, 3, len(weight), dtype=weight.dtype, device=weight.device)[None]
    return torch.allclose(module(example), _norm(module, example), rtol=2e-2, atol=1e-3)


class _WithoutTheHost(TorchDispatchMode):
    """Raises NotCapturableError before an operation whose result or output size requires host synchronization."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options, aten = kwargs or {}, torch.ops.aten
        waits = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if func in (aten.index.Tensor, aten.index_put_.default):  # with a mask, the output size depends on its values
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if func is aten._to_copy.default:
            waits = (options.get("device") or args[0].device).type != args[0].device.type
        if func is aten.copy_.default:
            waits = args[0].device.type != args[1].device.type and args[1].dim() > 0
        if func is aten.where.self:
            waits = len({argument.device.type for argument in args}) > 1
        if waits:
            raise NotCapturableError(f"a step of the model synchronizes with the host ({func})")
        return func(*args, **options)

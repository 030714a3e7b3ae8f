"""Continuous batching: each completion has a cache row, and a finished one leaves its row to the next completion.

All running rows take a step together, each at its own position. A row holds its prompt in the first columns, then one
column per token, so a row at position p attends to the columns up to p, and leftovers of an earlier completion after
them are masked. Running rows are the first ones: when one ends, the last one moves into its place.

On a CPU, a row's numbers do not depend on the rows beside it: noise belongs to the prompt (sampling.py); at least
`MIN_ROWS` rows are computed; prompts are prefilled at a width that depends on their own length; and the number of keys
of a step is a multiple of 16 (`row_tokens`), for which torch's attention sums the keys of a row in the same order
however many masked ones follow (measured with torch 2.13; other numbers of keys round differently). This is also why
the last bits differ from those of a cache that grows by one key per token.

Legend: R rows, n running rows, K columns, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, DynamicCache

from rlinf_workers.engines.base import Completions
from rlinf_workers.engines.huggingface.engine import MIN_ROWS
from rlinf_workers.engines.huggingface.free_memory import free_bytes
from rlinf_workers.engines.huggingface.graphs import PREFILL_TOKENS, one_query
from rlinf_workers.engines.huggingface.masks import StepPlaces, step_masks, whole_masks
from rlinf_workers.engines.huggingface.rows import CACHE_SHARE, cache_rows, row_tokens
from rlinf_workers.engines.sampling import SamplingSettings, prompt_noise, sample_by_blocks, sample_tokens
from rlinf_workers.engines.stopping import StopStrings
from rlinf_workers.errors import WorkersError
from rlinf_workers.models.cache_argument import as_cache
from rlinf_workers.models.placement import HOST
from rlinf_workers.models.sequences import pad_left
from rlinf_workers.roles.records.language import Prompt

ATTENTION = "rlinf_slots"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """The completion that a row holds."""

    index: int
    member: int
    policy_version: int


@dataclass(kw_only=True, slots=True)
class _Waiting:
    """A prompt with completions that have no row yet."""

    prompt: Prompt
    noise: Tensor
    """[G, T]"""
    members: deque[int]
    prefilled: tuple[list[Tensor], list[Tensor], Tensor] | None = None
    """Keys and values per layer, [heads, L, size], and the logits of the first token, [V]."""


@dataclass(kw_only=True, slots=True)
class _Cache:
    """Inputs and outputs of a step."""

    keys: list[Tensor]
    """[R, heads, K, size] each layer"""
    values: list[Tensor]
    tokens: Tensor
    """[R] int64, sampled last; not in the cache yet"""
    positions: Tensor
    """[R] int64, the column of `tokens`"""
    counts: Tensor
    """[R] int64, number of sampled tokens"""
    noise: Tensor
    """[R, T] float32"""
    token_ids: Tensor
    """[R, T] int64"""
    logprobs: Tensor
    """[R, T] float32"""
    rows: list[_Row] = field(default_factory=list)
    """The n running rows, which come first."""

    def of_rows(self) -> tuple[str, ...]:
        return ("tokens", "positions", "counts", "noise", "token_ids", "logprobs")

    def grow(self, num_rows: int) -> None:
        """Enlarges the cache to this many rows, one layer after the other, so that only one layer exists in both
        sizes."""
        for layers in (self.keys, self.values):
            for layer, places in enumerate(layers):
                layers[layer] = self._grown(places, num_rows)
        for name in self.of_rows():
            setattr(self, name, self._grown(getattr(self, name), num_rows))

    def _grown(self, tensor: Tensor, num_rows: int) -> Tensor:
        grown = tensor.new_zeros(num_rows, *tensor.shape[1:])
        grown[: len(self.rows)] = tensor[: len(self.rows)]
        return grown

    def move(self, sources: list[int], targets: list[int], num_keys: int) -> None:
        """Copies rows `sources` to rows `targets`."""
        for tensor in (*self.keys, *self.values):
            tensor[targets, :, :num_keys] = tensor[sources, :, :num_keys]
        for name in self.of_rows():
            tensor = getattr(self, name)
            tensor[targets] = tensor[sources]
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]

    def to(self, device: torch.device) -> None:
        self.keys = [tensor.to(device) for tensor in self.keys]
        self.values = [tensor.to(device) for tensor in self.values]
        for name in self.of_rows():
            setattr(self, name, getattr(self, name).to(device))


class Slots:
    """Samples completions of prompts that arrive while earlier ones are in flight.

    Args:
        model: a model for which graphs.why_not returns None.
        stop_ids: [S] int64, tokens that end a completion.
        max_rows: maximum number of running completions; None: as many as fit in the cache.
        cache_share: share of the free memory that the cache may take; None: `CACHE_SHARE`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        device: torch.device,
        *,
        stop_ids: Tensor,
        pad_id: int,
        max_rows: int | None,
        cache_share: float | None,
    ) -> None:
        self._model, self._tokenizer, self._device = model, tokenizer, device
        self._stop_ids, self._pad_id = stop_ids, pad_id
        self._max_rows = max_rows
        self._share = CACHE_SHARE.get(device.type, CACHE_SHARE["cpu"]) if cache_share is None else cache_share
        self._draws = sample_by_blocks if device.type == "cuda" else sample_tokens
        self._waiting: deque[_Waiting] = deque()
        self._sampling: SamplingSettings | None = None
        self._stops: StopStrings | None = None
        self._cache: _Cache | None = None
        self._num_columns = 0
        self._limit: int | None = None
        """Number of rows that fit; None: not known before the first prompts."""
        self._version = -1
        AttentionInterface.register(ATTENTION, _attention)

    @property
    def num_running(self) -> int:
        return len(self._cache.rows) if self._cache is not None else 0

    @property
    def num_under_way(self) -> int:
        """Running and waiting completions."""
        return self.num_running + sum(len(one.members) for one in self._waiting)

    def free_capacity(self, group_size: int) -> int:
        """How many prompts it accepts now. The last of them may get rows for only part of its group at first, so that
        rows are not idle until a whole group fits."""
        limit = self._limit or self._max_rows or group_size
        return -(-max(0, limit - self.num_under_way) // group_size)

    def submit(
        self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, width: int, seed: int, step: int
    ) -> None:
        """Accepts prompts; nothing is computed before `finished`.

        Args:
            width: length of the longest possible prompt.
        Raises:
            ValueError: completions in flight have other sampling settings.
            WorkersError: the cache of a single completion does not fit in memory.
        """
        if self.num_under_way and sampling != self._sampling:
            raise ValueError(f"completions in flight are sampled with {self._sampling}, not with {sampling}")
        if sampling != self._sampling:
            self._sampling = sampling
            self._stops = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        if not self.num_under_way:
            self._size(width + sampling.max_new_tokens, sampling.max_new_tokens)
        noise = prompt_noise(seed, step, [prompt.index for prompt in prompts], sampling).to(self._device)
        for prompt, own in zip(prompts, noise.split(sampling.group_size), strict=True):
            self._waiting.append(_Waiting(prompt=prompt, noise=own, members=deque(range(sampling.group_size))))

    @torch.no_grad()
    def finished(self) -> list[Completions]:
        """Computes until a completion ends; empty if none is in flight."""
        while self.num_under_way:
            done = self._begin() or self._step()
            if done:
                return done
        return []

    def weights_received(self, policy_version: int) -> None:
        self._version = policy_version
        for one in self._waiting:
            one.prefilled = None

    def offload(self) -> None:
        """Frees the cache; running rows wait on the host."""
        if self._cache is not None and not self._cache.rows:
            self._cache = None
        elif self._cache is not None and self._device.type != "cpu":
            self._cache.to(HOST)
        for one in self._waiting:
            one.prefilled = None

    def onload(self) -> None:
        if self._cache is not None:
            self._cache.to(self._device)

    # -- memory ----------------------------------------------------------------------------------------------------

    def _size(self, num_columns: int, num_tokens: int) -> None:
        """Computes the maximum number of rows."""
        self._num_columns = row_tokens(num_columns)
        sizes = self._num_columns, num_tokens
        if self._cache is not None and (self._cache.keys[0].shape[2], self._cache.noise.shape[1]) != sizes:
            self._cache = None
        config = self._model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        row_bytes = 2 * config.num_hidden_layers * heads * size * self._model.dtype.itemsize * self._num_columns
        held = 0 if self._cache is None else len(self._cache.tokens) * row_bytes
        free = free_bytes(self._device) + held
        self._limit = int(self._share * free / row_bytes)
        if self._max_rows is not None:
            self._limit = min(self._limit, self._max_rows)
        if self._limit < 1:
            raise WorkersError(
                f"the cache of one completion of {num_columns} tokens, including its prompt, needs "
                f"{row_bytes / 1e9:.2f} GB, which does not fit in {self._share:g} of the {free / 1e9:.2f} GB free on "
                f"{self._device}; allow shorter completions (max_new_tokens), or more of the memory "
                "(engine_options.cache_share)"
            )

    def _reserve(self, num_rows: int, keys: list[Tensor], values: list[Tensor]) -> _Cache:
        """A cache with at least this many rows; it grows as needed. Keys and values are those of a prompt."""
        assert self._limit is not None, "set by submit"
        if self._cache is None:
            self._cache = self._empty(keys, values)
        if len(self._cache.tokens) < num_rows:
            self._cache.grow(cache_rows(num_rows, most=self._limit))
        return self._cache

    def _empty(self, keys: list[Tensor], values: list[Tensor]) -> _Cache:
        """A cache without rows, with the shapes and dtypes of a prompt's tensors."""
        assert self._sampling is not None, "set by submit"
        num_tokens = self._sampling.max_new_tokens

        def none(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(0, *shape, dtype=dtype, device=self._device)

        def places(layers: list[Tensor]) -> list[Tensor]:
            return [none(one.shape[0], self._num_columns, one.shape[2], dtype=one.dtype) for one in layers]

        return _Cache(
            keys=places(keys),
            values=places(values),
            tokens=none(),
            positions=none(),
            counts=none(),
            noise=none(num_tokens, dtype=torch.float32),
            token_ids=none(num_tokens),
            logprobs=none(num_tokens, dtype=torch.float32),
        )

    # -- running ---------------------------------------------------------------------------------------------------

    def _begin(self) -> list[Completions]:
        """Assigns free rows to waiting completions and samples their first tokens. Returns those that end at once."""
        assert self._limit is not None, "set by submit"
        free, entering = self._limit - self.num_running, []
        while free > 0 and self._waiting:
            one = self._waiting[0]
            members = [one.members.popleft() for _ in range(min(free, len(one.members)))]
            entering.append((one, members))
            free -= len(members)
            if one.members:
                break
            self._waiting.popleft()
        if not entering:
            return []
        self._prefill([one for one, _ in entering if one.prefilled is None])
        first = self.num_running
        keys, values, _ = _prefilled(entering[0][0])
        self._reserve(first + sum(len(members) for _, members in entering), keys, values)
        for one, members in entering:
            self._enter(one, members)
        logits = torch.cat([_prefilled(one)[2].expand(len(members), -1) for one, members in entering])
        return self._draw(first, logits)

    def _enter(self, one: _Waiting, members: Sequence[int]) -> None:
        keys, values, _ = _prefilled(one)
        cache, n, num_prompt = self._cache, self.num_running, len(one.prompt.token_ids)
        assert cache is not None, "created for the entering rows"
        rows = slice(n, n + len(members))
        for places, layers in ((cache.keys, keys), (cache.values, values)):
            for place, layer in zip(places, layers, strict=True):
                place[rows, :, :num_prompt] = layer
        cache.positions[rows] = num_prompt - 1
        cache.counts[rows] = 0
        cache.noise[rows] = one.noise[list(members)]
        cache.token_ids[rows] = self._pad_id
        cache.logprobs[rows] = 0.0
        cache.rows += [_Row(index=one.prompt.index, member=member, policy_version=self._version) for member in members]

    def _prefill(self, waiting: Sequence[_Waiting]) -> None:
        """Prefills prompts of one width in one forward pass: left-padded to the length given by `row_tokens`."""
        by_width: dict[int, list[_Waiting]] = {}
        for one in waiting:
            by_width.setdefault(row_tokens(len(one.prompt.token_ids)), []).append(one)
        for width, those in by_width.items():
            at_once = max(1, PREFILL_TOKENS // width)
            for start in range(0, len(those), at_once):
                self._prefill_some(those[start : start + at_once], width)

    def _prefill_some(self, waiting: Sequence[_Waiting], width: int) -> None:
        token_ids, mask = pad_left([one.prompt.token_ids for one in waiting], width, self._pad_id)
        cache = DynamicCache()  # without the config: it keeps all keys of layers with a window, too
        with whole_masks():
            output = self._model(
                input_ids=token_ids.to(self._device),
                position_ids=(mask.cumsum(1) - 1).clamp_(min=0).to(self._device),
                attention_mask=mask.to(self._device),
                **as_cache(cache),
                use_cache=True,
                logits_to_keep=MIN_ROWS,  # also for one prompt, the head computes this many rows
            )
        for i, one in enumerate(waiting):
            keys, values = (
                [getattr(layer, name)[i, :, width - len(one.prompt.token_ids) :].clone() for layer in cache.layers]
                for name in ("keys", "values")
            )
            one.prefilled = keys, values, output.logits[i, -1].clone()

    def _step(self) -> list[Completions]:
        """Computes one more token for each row. Returns the completions that end with it."""
        cache = self._cache
        assert cache is not None and cache.rows, "a row is running, or _begin has assigned one"
        rows = slice(0, max(MIN_ROWS, len(cache.rows)))
        cache.positions[len(cache.rows) : rows.stop] = 0
        num_keys = self._num_keys(cache)
        positions = cache.positions[rows]
        mask = torch.arange(num_keys, device=self._device) <= positions[:, None]
        config = self._model.config
        before, config._attn_implementation = config._attn_implementation, ATTENTION
        try:
            with step_masks(ATTENTION, StepPlaces(queries=positions, num_keys=num_keys)):
                output = self._model(
                    input_ids=cache.tokens[rows, None],
                    position_ids=positions[:, None],
                    attention_mask=mask,
                    **as_cache(_RowsCache(cache, positions, num_keys)),
                    use_cache=True,
                    logits_to_keep=1,
                )
        finally:
            config._attn_implementation = before
        return self._draw(0, output.logits[: len(cache.rows), -1])

    def _num_keys(self, cache: _Cache) -> int:
        longest = int(cache.positions[: len(cache.rows)].max()) + 1
        return row_tokens(longest)

    def _draw(self, first: int, logits: Tensor) -> list[Completions]:
        """Samples the next tokens of the rows from `first` on. Returns the completions that end; their rows are
        free."""
        cache, sampling = self._cache, self._sampling
        assert cache is not None and sampling is not None, "set by submit and _enter"
        rows = slice(first, first + len(logits))
        counts = cache.counts[rows]
        uniform = cache.noise[rows].gather(1, counts[:, None])[:, 0]
        tokens, logprobs = self._draws(logits, uniform, sampling)
        cache.tokens[rows] = tokens
        cache.token_ids[rows].scatter_(1, counts[:, None], tokens[:, None])
        cache.logprobs[rows].scatter_(1, counts[:, None], logprobs[:, None])
        cache.counts[rows] += 1  # `counts` is a view of it
        cache.positions[rows] += 1
        ended = torch.isin(tokens, self._stop_ids)
        if self._stops is not None:
            texts = cache.token_ids[rows].tolist()
            for i, (token_ids, count) in enumerate(zip(texts, counts.tolist(), strict=True)):
                ended[i] |= self._stops.end(token_ids[:count], begun=count - 1) is not None
        done = ended | (counts == sampling.max_new_tokens)
        return self._leave(cache, (first + done.nonzero()[:, 0]).tolist(), ended[done].tolist())

    def _leave(self, cache: _Cache, leaving: list[int], ended: list[bool]) -> list[Completions]:
        """Returns the completions of rows, and moves running rows into their places."""
        if not leaving:
            return []
        counts = cache.counts[leaving].tolist()
        token_ids, logprobs = cache.token_ids[leaving].cpu(), cache.logprobs[leaving].cpu()
        completions = [
            Completions(
                index=cache.rows[row].index,
                members=(cache.rows[row].member,),
                token_ids=token_ids[i : i + 1, :count],
                loss_mask=torch.ones(1, count),
                logprobs=logprobs[i : i + 1, :count],
                truncated=torch.tensor([not ended[i]]),
                policy_version=cache.rows[row].policy_version,
            )
            for i, (row, count) in enumerate(zip(leaving, counts, strict=True))
        ]
        left = len(cache.rows) - len(leaving)
        gone = set(leaving)
        holes = [row for row in leaving if row < left]
        movers = [row for row in range(left, len(cache.rows)) if row not in gone]
        if movers:
            cache.move(movers, holes, self._num_keys(cache))
        del cache.rows[left:]
        return completions


class _RowsCache(Cache):
    """Presents the rows of a step as a transformers cache; each row is written at its own position."""

    def __init__(self, cache: _Cache, positions: Tensor, num_keys: int) -> None:
        super().__init__(layers=[])
        self._cache, self._num_keys = cache, num_keys
        self._places = torch.arange(len(positions), device=positions.device), slice(None), positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.keys[layer_idx], self._cache.values[layer_idx]
        keys[self._places], values[self._places] = key_states[:, :, 0], value_states[:, :, 0]
        return keys[: len(key_states), :, : self._num_keys], values[: len(key_states), :, : self._num_keys]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """transformers uses this for positions, which are passed explicitly."""
        return 0


def _prefilled(one: _Waiting) -> tuple[list[Tensor], list[Tensor], Tensor]:
    assert one.prefilled is not None, "a prompt is prefilled before it gets a row"
    return one.prefilled


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one query per row, [R, heads, 1, size], in the signature that transformers expects. On a CPU each
    head is multiplied separately: several at once round differently with more masked keys."""
    if query.device.type != "cpu":
        return one_query(module, query, key, value, attention_mask, **options)
    shares = key.shape[1] != query.shape[1]
    output = scaled_dot_product_attention(
        query, key, value, attention_mask, scale=options.get("scaling"), enable_gqa=shares
    )
    return output.transpose(1, 2), None

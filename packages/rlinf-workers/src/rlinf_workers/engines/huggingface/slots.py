"""Continuous batching: each completion has a cache row, and a finished one leaves its row to the next completion.

All running rows take a step together, each at its own position. A row holds its prompt in the first columns, then one
column per token, so a row at position p attends to the columns up to p, and leftovers of an earlier completion after
them are masked. Running rows are the first ones: when one ends, the last one moves into its place.

On a CPU, a row's numbers do not depend on the rows beside it: noise belongs to the prompt (sampling.py); at least
`MIN_ROWS` rows are computed; prompts are prefilled at a width that depends on their own length; and the number of keys
of a step is a multiple of 16 (`row_tokens`), for which torch's attention sums the keys of a row in the same order
however many masked ones follow (measured with torch 2.13; other numbers of keys round differently). This is also why
the last bits differ from those of a cache that grows by one key per token.

Between two steps it can take new weights. Running completions keep their cache, or leave their rows and enter them
again, at the front of the queue, where prompt and tokens are prefilled like a longer prompt. Suspended completions
return in the same way.

Legend: R rows, n running rows, K columns, T new tokens, V vocabulary.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, DynamicCache

from rlinf_workers.engines.base import Completions, OnNewWeights, UnfinishedCompletion
from rlinf_workers.engines.huggingface.engine import MIN_ROWS
from rlinf_workers.engines.huggingface.free_memory import free_bytes
from rlinf_workers.engines.huggingface.graphs import PREFILL_TOKENS, one_query
from rlinf_workers.engines.huggingface.kept import KeptTurns
from rlinf_workers.engines.huggingface.masks import StepPlaces, step_masks, whole_masks
from rlinf_workers.engines.huggingface.rows import CACHE_SHARE, cache_rows, row_tokens
from rlinf_workers.engines.sampling import (
    NoiseKey,
    SamplingSettings,
    prompt_noise,
    sample_by_blocks,
    sample_kept,
    sample_tokens,
)
from rlinf_workers.engines.segments import Segments, extended
from rlinf_workers.engines.stopping import StopStrings
from rlinf_workers.errors import WorkersError
from rlinf_workers.models.cache_argument import as_cache
from rlinf_workers.models.packed_attention import decoder_attention
from rlinf_workers.models.pictures import padded_places, padded_positions, rope_offset, seen
from rlinf_workers.models.placement import HOST
from rlinf_workers.models.router_replay import recorded_experts
from rlinf_workers.models.sequences import pad_left
from rlinf_workers.roles.records.kept_tokens import KeptTokens, split_by_row
from rlinf_workers.roles.records.language import Prompt

ATTENTION = "rlinf_slots"
_Prefilled = tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]
"""Keys and values per layer, [heads, L, size], the logits of the next token, [V], and the experts of the tokens, [L,
layers, k] on the CPU, if they are recorded."""


@dataclass(kw_only=True, slots=True)
class _Row:
    """The completion that a row holds."""

    prompt: Prompt
    member: int
    key: NoiseKey
    segments: Segments
    """Of the tokens sampled by earlier versions."""
    policy_version: int
    """Samples the tokens after these."""
    prompt_experts: Tensor | None
    """As in `Completions`."""
    kept_tokens: list[Tensor]
    """The kept ids of each token so far, if they are recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """The tokens that a completion already has."""

    token_ids: Tensor
    """[t] int64 on the CPU, t at least 1"""
    logprobs: Tensor
    """[t] float32 on the CPU"""
    segments: Segments
    kept_tokens: tuple[Tensor, ...]
    """As in `_Row`."""


@dataclass(kw_only=True, slots=True)
class _Waiting:
    """A prompt with completions that have no row yet, or a single completion that has tokens and lost its row."""

    prompt: Prompt
    key: NoiseKey
    noise: Tensor
    """[G, T], or [1, T] for a completion that has tokens"""
    members: deque[int]
    begun: _Begun | None = None
    prefilled: _Prefilled | None = None

    @property
    def token_ids(self) -> Tensor:
        """[L], the tokens to prefill."""
        ids = self.prompt.token_ids
        return ids if self.begun is None else torch.cat([ids, self.begun.token_ids])

    def unfinished(self) -> list[UnfinishedCompletion]:
        none = _Begun(token_ids=torch.zeros(0, dtype=torch.int64), logprobs=torch.zeros(0), segments=(), kept_tokens=())
        begun = self.begun or none
        return [
            UnfinishedCompletion(
                prompt=self.prompt,
                member=member,
                token_ids=begun.token_ids,
                logprobs=begun.logprobs,
                segments=begun.segments,
                kept_tokens=KeptTokens.of_rows([begun.kept_tokens]) if begun.kept_tokens else None,
                noise=self.key,
            )
            for member in self.members
        ]


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
    offsets: Tensor
    """[R] int64, how far the positions of new tokens differ from their columns; not 0 after pictures"""
    counts: Tensor
    """[R] int64, number of sampled tokens"""
    noise: Tensor
    """[R, T] float32"""
    token_ids: Tensor
    """[R, T] int64"""
    logprobs: Tensor
    """[R, T] float32"""
    experts: Tensor | None
    """[R, T, layers, k], of the tokens in the cache; None: not recorded. Small beside keys and values."""
    rows: list[_Row] = field(default_factory=list)
    """The n running rows, which come first."""

    def of_rows(self) -> tuple[str, ...]:
        names = ("tokens", "positions", "offsets", "counts", "noise", "token_ids", "logprobs")
        return names if self.experts is None else (*names, "experts")

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
        keeps_turns: see kept.py. Half of the share is for what is kept, at most as much as the rows have.
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
        keeps_turns: bool = False,
    ) -> None:
        self._model, self._tokenizer, self._device = model, tokenizer, device
        self._stop_ids, self._pad_id = stop_ids, pad_id
        self._max_rows = max_rows
        self._share = CACHE_SHARE.get(device.type, CACHE_SHARE["cpu"]) if cache_share is None else cache_share
        self._kept = KeptTurns(model) if keeps_turns else None
        self._draws = sample_by_blocks if device.type == "cuda" else sample_tokens
        self._waiting: deque[_Waiting] = deque()
        self._sampling: SamplingSettings | None = None
        self._stops: StopStrings | None = None
        self._cache: _Cache | None = None
        self._num_columns = 0
        self._limit: int | None = None
        """Number of rows that fit; None: not known before the first prompts."""
        self._portion = 0
        """Tokens of completions that enter again at once: as many as the prompts of a full cache have, so that they
        need no more memory beside it than a plan counts for these (`rows.refill_memory`)."""
        self._version = -1
        self._on_new_weights: OnNewWeights = "keep"
        self._is_paused = False
        self.num_steps = 0
        """Decode steps so far; entering rows count as one if completions end with it."""
        self._is_interrupted = threading.Event()
        self._stop_at: int | None = None
        """`finished` returns at this number of steps."""
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
        self._open(sampling, width)
        keys = [NoiseKey(seed=seed, step=step, index=prompt.index) for prompt in prompts]
        for prompt, key, noise in zip(prompts, keys, self._noise(keys, sampling), strict=True):
            members = deque(range(sampling.group_size))
            self._waiting.append(_Waiting(prompt=prompt, key=key, noise=noise, members=members))

    def submit_unfinished(
        self, unfinished: Sequence[UnfinishedCompletion], sampling: SamplingSettings, *, width: int
    ) -> None:
        """Accepts suspended completions, like `submit`. Raises: ValueError also for one that has all its tokens."""
        self._open(sampling, width)
        fresh: dict[NoiseKey, _Waiting] = {}
        """Completions without tokens, which share a prefill."""
        keys = list(dict.fromkeys(one.noise for one in unfinished))
        noise_of = dict(zip(keys, self._noise(keys, sampling), strict=True))
        for one in unfinished:
            if len(one.token_ids) >= sampling.max_new_tokens:
                raise ValueError(
                    f"completion {one.member} of prompt {one.prompt.index} has {len(one.token_ids)} tokens"
                )
            key = one.noise
            if key in fresh and not len(one.token_ids):
                fresh[key].members.append(one.member)
                continue
            waiting = _Waiting(prompt=one.prompt, key=key, noise=noise_of[key], members=deque([one.member]))
            if len(one.token_ids):
                waiting.noise = waiting.noise[one.member, None]
                kept_tokens = () if one.kept_tokens is None else one.kept_tokens.by_token(0)
                waiting.begun = _Begun(
                    token_ids=one.token_ids, logprobs=one.logprobs, segments=one.segments, kept_tokens=kept_tokens
                )
            else:
                fresh[key] = waiting
            self._waiting.append(waiting)

    def _noise(self, keys: Sequence[NoiseKey], sampling: SamplingSettings) -> Sequence[Tensor]:
        """[G, T] for each key."""
        return prompt_noise(keys, sampling).to(self._device).split(sampling.group_size)

    def _open(self, sampling: SamplingSettings, width: int) -> None:
        """Prepares for completions that are sampled like this, if none are in flight."""
        if self.num_under_way and sampling != self._sampling:
            raise ValueError(f"completions in flight are sampled with {self._sampling}, not with {sampling}")
        if sampling != self._sampling:
            self._sampling = sampling
            self._stops = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        if not self.num_under_way:
            limit = self._size(width + sampling.max_new_tokens, sampling.max_new_tokens)
            self._portion = min(PREFILL_TOKENS, -(-limit // sampling.group_size) * row_tokens(width))

    @torch.no_grad()
    def finished(self) -> list[Completions]:
        """Computes until a completion ends; empty if none is in flight, or after `interrupt`."""
        if self._is_paused:
            raise RuntimeError("the engine is paused; call resume() before finished()")
        while self.num_under_way:
            if self._has_to_stop():
                return []
            done = self._begin() or self._step()
            self.num_steps += 1
            if done:
                return done
        return []

    # -- new weights, and what outlives them -----------------------------------------------------------------------

    def interrupt(self, at_step: int) -> None:
        if at_step > self.num_steps:
            self._stop_at = at_step
        else:
            self._is_interrupted.set()

    def _has_to_stop(self) -> bool:
        """Whether `interrupt` was called for this step; says so once."""
        is_due = self.num_steps == self._stop_at
        if is_due:
            self._stop_at = None
        is_interrupted = self._is_interrupted.is_set()
        self._is_interrupted.clear()
        return is_due or is_interrupted

    @torch.no_grad()
    def pause(self, on_new_weights: OnNewWeights) -> list[Completions]:
        self._is_paused, self._on_new_weights = True, on_new_weights
        done = []
        while on_new_weights == "finish" and self.num_running:
            done += self._step()
        return done

    def resume(self) -> None:
        self._is_paused, self._on_new_weights = False, "keep"

    def weights_received(self, policy_version: int) -> None:
        """Later tokens are sampled with these weights. Running rows keep their cache, or are queued to compute it
        again, depending on `pause`."""
        if self._on_new_weights == "recompute":
            self._clear_rows()
        elif self._cache is not None:
            for row, count in zip(self._cache.rows, self._cache.counts.tolist(), strict=False):
                row.segments = extended(row.segments, count, row.policy_version)
                row.policy_version = policy_version
        self._version = policy_version
        self._forget_prefilled()

    def suspend(self) -> list[UnfinishedCompletion]:
        self._clear_rows()
        suspended = [completion for one in self._waiting for completion in one.unfinished()]
        self._waiting.clear()
        return suspended

    def _clear_rows(self) -> None:
        """Moves the running completions to the front of the queue, with their tokens and without their cache.

        Raises: ValueError where experts are recorded, which would be lost.
        """
        cache = self._cache
        if cache is None:
            return
        if cache.rows and cache.experts is not None:
            raise ValueError("completions whose experts are recorded keep their rows to the end")
        token_ids, logprobs, counts = cache.token_ids.cpu(), cache.logprobs.cpu(), cache.counts.tolist()
        for i, row in reversed(list(enumerate(cache.rows))):
            begun = _Begun(
                token_ids=token_ids[i, : counts[i]].clone(),
                logprobs=logprobs[i, : counts[i]].clone(),
                segments=extended(row.segments, counts[i], row.policy_version),
                kept_tokens=tuple(row.kept_tokens),
            )
            noise, members = cache.noise[i, None].clone(), deque([row.member])
            self._waiting.appendleft(
                _Waiting(prompt=row.prompt, key=row.key, noise=noise, members=members, begun=begun)
            )
        cache.rows.clear()

    def offload(self) -> None:
        """Frees the cache; running rows wait on the host."""
        if self._cache is not None and not self._cache.rows:
            self._cache = None
        elif self._cache is not None and self._device.type != "cpu":
            self._cache.to(HOST)
        self._forget_prefilled()

    def onload(self) -> None:
        if self._cache is not None:
            self._cache.to(self._device)

    def _forget_prefilled(self) -> None:
        for one in self._waiting:
            one.prefilled = None
        if self._kept is not None:
            self._kept.clear()

    # -- memory ----------------------------------------------------------------------------------------------------

    def _size(self, num_columns: int, num_tokens: int) -> int:
        """Computes the maximum number of rows, and returns it."""
        self._num_columns = row_tokens(num_columns)
        sizes = self._num_columns, num_tokens
        if self._cache is not None and (self._cache.keys[0].shape[2], self._cache.noise.shape[1]) != sizes:
            self._cache = None
        if self._cache is not None and (self._cache.experts is not None) != self._records_experts:
            self._cache = None
        config = self._model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        row_bytes = 2 * config.num_hidden_layers * heads * size * self._model.dtype.itemsize * self._num_columns
        held = 0 if self._cache is None else len(self._cache.tokens) * row_bytes
        held += 0 if self._kept is None else self._kept.num_bytes
        free = free_bytes(self._device) + held
        share = self._share if self._kept is None else self._share / 2  # what is kept has as much as the rows
        self._limit = int(share * free / row_bytes)
        if self._max_rows is not None:
            self._limit = min(self._limit, self._max_rows)
        if self._limit < 1:
            raise WorkersError(
                f"the cache of one completion of {num_columns} tokens, including its prompt, needs "
                f"{row_bytes / 1e9:.2f} GB, which does not fit in {share:g} of the {free / 1e9:.2f} GB free on "
                f"{self._device}; allow shorter completions (max_new_tokens), or more of the memory "
                "(engine_options.cache_share)"
            )
        return self._limit

    @property
    def _records_experts(self) -> bool:
        return self._sampling is not None and self._sampling.records_experts

    def _recorded(self) -> AbstractContextManager[list[list[Tensor]] | None]:
        """`recorded_experts` of the next call of the model, if they are recorded."""
        return recorded_experts(self._model) if self._records_experts else nullcontext()

    def _reserve(self, num_rows: int, prompt: _Prefilled) -> _Cache:
        """A cache with at least this many rows; it grows as needed."""
        assert self._limit is not None, "set by submit"
        if self._cache is None:
            self._cache = self._empty(prompt)
        if len(self._cache.tokens) < num_rows:
            self._cache.grow(cache_rows(num_rows, most=self._limit, keeps_turns=self._kept is not None))
        if self._kept is not None:
            self._kept.max_bytes = sum(layer.nbytes for layer in (*self._cache.keys, *self._cache.values))
        return self._cache

    def _empty(self, prompt: _Prefilled) -> _Cache:
        """A cache without rows, with the shapes and dtypes of a prompt's tensors."""
        assert self._sampling is not None, "set by submit"
        num_tokens, (keys, values, _, experts) = self._sampling.max_new_tokens, prompt

        def none(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(0, *shape, dtype=dtype, device=self._device)

        def places(layers: list[Tensor]) -> list[Tensor]:
            return [none(one.shape[0], self._num_columns, one.shape[2], dtype=one.dtype) for one in layers]

        return _Cache(
            keys=places(keys),
            values=places(values),
            tokens=none(),
            positions=none(),
            offsets=none(),
            counts=none(),
            noise=none(num_tokens, dtype=torch.float32),
            token_ids=none(num_tokens),
            logprobs=none(num_tokens, dtype=torch.float32),
            experts=None if experts is None else none(num_tokens, *experts.shape[1:], dtype=experts.dtype),
        )

    # -- running ---------------------------------------------------------------------------------------------------

    def _begin(self) -> list[Completions]:
        """Assigns free rows to waiting completions and samples their next tokens. Returns those that end at once."""
        while entering := self._entering():
            self._prefill([one for one, _ in entering if one.prefilled is None])
            first = self.num_running
            self._reserve(first + sum(len(members) for _, members in entering), _prefilled(entering[0][0]))
            for _, alike in groupby(entering, lambda pair: id(pair[0].prefilled)):
                self._enter(list(alike))
            logits = torch.cat([_prefilled(one)[2].expand(len(members), -1) for one, members in entering])
            if done := self._draw(first, logits):
                return done
        return []

    def _entering(self) -> list[tuple[_Waiting, list[int]]]:
        """The next waiting completions for which rows are free; of those that have tokens, a portion."""
        assert self._limit is not None, "set by submit"
        free, num_tokens, entering = self._limit - self.num_running, 0, []
        while free > 0 and self._waiting:
            one = self._waiting[0]
            num_tokens += len(one.token_ids) if one.begun is not None else 0
            if entering and num_tokens > self._portion:
                break
            members = [one.members.popleft() for _ in range(min(free, len(one.members)))]
            entering.append((one, members))
            free -= len(members)
            if one.members:
                break
            self._waiting.popleft()
        return entering

    def _enter(self, entering: Sequence[tuple[_Waiting, Sequence[int]]]) -> None:
        """Gives rows to members of waiting completions that share a prefill."""
        first = entering[0][0]
        keys, values, _, experts = _prefilled(first)
        cache, n, num_tokens = self._cache, self.num_running, len(first.token_ids)
        assert cache is not None, "created for the entering rows"
        rows = slice(n, n + sum(len(members) for _, members in entering))
        for places, layers in ((cache.keys, keys), (cache.values, values)):
            for place, layer in zip(places, layers, strict=True):
                place[rows, :, :num_tokens] = layer
        cache.positions[rows] = num_tokens - 1
        cache.offsets[rows] = rope_offset(first.prompt.pictures)
        cache.counts[rows] = 0
        cache.token_ids[rows] = self._pad_id
        cache.logprobs[rows] = 0.0
        if cache.experts is not None:
            cache.experts[rows] = 0
        cache.noise[rows] = torch.cat(
            [one.noise[list(members)] if one.begun is None else one.noise for one, members in entering]
        )
        for one, members in entering:
            segments: Segments = ()
            if one.begun is not None:
                count, segments, row = len(one.begun.token_ids), one.begun.segments, len(cache.rows)
                cache.counts[row] = count
                cache.token_ids[row, :count] = one.begun.token_ids.to(self._device)
                cache.logprobs[row, :count] = one.begun.logprobs.to(self._device)
            cache.rows += [
                _Row(
                    prompt=one.prompt,
                    member=member,
                    key=one.key,
                    segments=segments,
                    policy_version=self._version,
                    prompt_experts=experts,
                    kept_tokens=[] if one.begun is None else [*one.begun.kept_tokens],
                )
                for member in members
            ]

    def _prefill(self, waiting: Sequence[_Waiting]) -> None:
        """Prefills prompts. Equal ones, such as those of the first turns of a group of episodes, are computed once."""
        by_content: dict[tuple[bytes, str], list[_Waiting]] = {}
        for one in waiting:
            digest = "" if one.prompt.pictures is None else one.prompt.pictures.digest
            by_content.setdefault((one.token_ids.numpy().tobytes(), digest), []).append(one)
        first = [alike[0] for alike in by_content.values()]
        if self._kept is None:
            computed = self._prefill_by_width(first)
        else:
            pictures = [one.prompt.pictures for one in first]
            computed = [(*one, None) for one in self._kept.prefill([one.token_ids for one in first], pictures)]
        for alike, prefilled in zip(by_content.values(), computed, strict=True):
            for one in alike:
                one.prefilled = prefilled

    def _prefill_by_width(self, waiting: Sequence[_Waiting]) -> list[_Prefilled]:
        """Prefills sequences, those of one width in one forward pass: left-padded to the length given by
        `row_tokens`."""
        by_width: dict[int, list[int]] = {}
        for index, one in enumerate(waiting):
            by_width.setdefault(row_tokens(len(one.token_ids)), []).append(index)
        computed: dict[int, _Prefilled] = {}
        for width, indices in by_width.items():
            at_once = max(1, PREFILL_TOKENS // width)
            for start in range(0, len(indices), at_once):
                part = indices[start : start + at_once]
                prefilled = self._prefill_some([waiting[index] for index in part], width)
                computed |= zip(part, prefilled, strict=True)
        return [computed[index] for index in range(len(waiting))]

    def _prefill_some(self, waiting: Sequence[_Waiting], width: int) -> list[_Prefilled]:
        sequences = [one.token_ids for one in waiting]
        token_ids, mask = pad_left(sequences, width, self._pad_id)
        pictures = [one.prompt.pictures for one in waiting]
        positions = padded_positions(pictures, mask)
        places = padded_places(pictures, mask)
        cache = DynamicCache()  # without the config: it keeps all keys of layers with a window, too
        with whole_masks(), self._recorded() as choices, seen(self._model, pictures, places) as arguments:
            output = self._model(
                input_ids=token_ids.to(self._device),
                position_ids=positions.to(self._device),
                attention_mask=mask.to(self._device),
                **as_cache(cache),
                use_cache=True,
                logits_to_keep=MIN_ROWS,  # also for one prompt, the head computes this many rows
                **arguments,
            )
        experts: Tensor | None = None
        if choices is not None:
            experts = torch.stack([call for (call,) in choices], 1).cpu().unflatten(0, (-1, width))
        prefilled: list[_Prefilled] = []
        for i, sequence in enumerate(sequences):
            keys, values = (
                [getattr(layer, name)[i, :, width - len(sequence) :].clone() for layer in cache.layers]
                for name in ("keys", "values")
            )
            own = None if experts is None else experts[i, width - len(sequence) :].clone()
            prefilled.append((keys, values, output.logits[i, -1].clone(), own))
        return prefilled

    def _step(self) -> list[Completions]:
        """Computes one more token for each row. Returns the completions that end with it."""
        cache = self._cache
        assert cache is not None and cache.rows, "a row is running, or _begin has assigned one"
        rows = slice(0, self._num_rows(cache))
        cache.positions[len(cache.rows) : rows.stop] = cache.offsets[len(cache.rows) : rows.stop] = 0
        num_keys = self._num_keys(cache)
        positions = cache.positions[rows]
        mask = torch.arange(num_keys, device=self._device) <= positions[:, None]
        places = StepPlaces(queries=positions, num_keys=num_keys)
        with (
            decoder_attention(self._model, ATTENTION),
            step_masks(ATTENTION, places),
            self._recorded() as choices,
        ):
            output = self._model(
                input_ids=cache.tokens[rows, None],
                position_ids=(positions + cache.offsets[rows])[:, None],
                attention_mask=mask,
                **as_cache(_RowsCache(cache, positions, num_keys)),
                use_cache=True,
                logits_to_keep=1,
            )
        if choices is not None and cache.experts is not None:
            running = torch.arange(len(cache.rows), device=self._device)
            chosen = torch.stack([call for (call,) in choices], 1)  # [rows, layers, k]
            cache.experts[running, cache.counts[running] - 1] = chosen[running]
        return self._draw(0, output.logits[: len(cache.rows), -1])

    def _num_rows(self, cache: _Cache) -> int:
        """Of a step."""
        num_rows = len(cache.rows)
        return max(MIN_ROWS, num_rows) if self._kept is None else self._kept.num_rows(num_rows)

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
        if sampling.records_kept:
            tokens, logprobs, is_kept = sample_kept(logits, uniform, sampling)
            for row, ids in zip(cache.rows[rows], split_by_row(is_kept), strict=True):
                row.kept_tokens.append(ids)
        else:
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
        experts = None if cache.experts is None else cache.experts[leaving].cpu()
        completions = []
        for i, (row, count) in enumerate(zip(leaving, counts, strict=True)):
            held = cache.rows[row]
            segments = extended(held.segments, count, held.policy_version)
            completions.append(
                Completions(
                    index=held.prompt.index,
                    members=(held.member,),
                    token_ids=token_ids[i : i + 1, :count],
                    loss_mask=torch.ones(1, count),
                    logprobs=logprobs[i : i + 1, :count],
                    truncated=torch.tensor([not ended[i]]),
                    prompt_experts=held.prompt_experts,
                    experts=None if experts is None else experts[i : i + 1, : count - 1],
                    kept_tokens=KeptTokens.of_rows([held.kept_tokens]) if held.kept_tokens else None,
                    policy_version=segments[0].policy_version,
                    segments=(segments,) if len(segments) > 1 else (),
                )
            )
        if self._kept is not None:
            self._keep(self._kept, cache, leaving, completions)
        left = len(cache.rows) - len(leaving)
        gone = set(leaving)
        holes = [row for row in leaving if row < left]
        movers = [row for row in range(left, len(cache.rows)) if row not in gone]
        if movers:
            cache.move(movers, holes, self._num_keys(cache))
        del cache.rows[left:]
        return completions

    def _keep(
        self, turns: KeptTurns, cache: _Cache, leaving: Sequence[int], completions: Sequence[Completions]
    ) -> None:
        """Keeps the keys and values of completions that one version has sampled; the last token has none."""
        for row, completion in zip(leaving, completions, strict=True):
            if not completion.segments:
                prompt = cache.rows[row].prompt
                token_ids = torch.cat([prompt.token_ids, completion.token_ids[0, :-1]])
                keys, values = (
                    [layer[row, :, : len(token_ids)] for layer in layers] for layers in (cache.keys, cache.values)
                )
                turns.add(token_ids, keys, values, prompt.pictures)


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


def _prefilled(one: _Waiting) -> _Prefilled:
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

"""Tests on a tiny model whether this system computes an architecture as transformers does.

A model computes a sequence in one forward pass without padding or cache. Engine and actor compute it in other ways:
left-padded, in pieces with a cache, with cache rows that are reused, packed. A transformers model may interpret mask,
cache and positions as it likes, and names and attributes do not tell whether all these ways agree. A copy with the same
layers and small sizes (models/small_copy.py) does, in about a second: each way must reproduce the log-probabilities of
the plain forward pass, with prompts and completions longer than every attention window.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.huggingface.graphs import why_not
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.models.language_model import LoadedModel
from rlinf_workers.models.packed import pack_without_padding, packed_logits
from rlinf_workers.models.pictures import auto_class
from rlinf_workers.models.router_replay import replayed_experts
from rlinf_workers.models.sequences import completion_logits, pack_groups
from rlinf_workers.models.small_copy import NoSmallCopy, one_line, small_config, small_model
from rlinf_workers.roles.language.rollout import OpenGroups
from rlinf_workers.roles.records.language import Prompt, SampleGroup

CPU = torch.device("cpu")
CACHE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
"""transformers' cache layers that hold keys and values, or nothing, where layers share them."""
PROMPT_LENGTHS = (3, 21, 11)
"""Shorter and longer than small_copy.WINDOW."""
WIDTH = 23
GROUP_SIZE, NUM_TOKENS = 2, 20
COMPLETION_LENGTHS = (20, 5)
BRANCHED_TOKENS = 16
FIRST_TOKEN = 8
"""Lower token ids may be special."""
BOUND = 1e-5
"""Nats. Rounding of most copies is below 1e-6 with any of torch's kernels; one key too many or too few shows as 1e-3 or
more (docs/models.md)."""
ROUNDING_FACTOR, NUM_DRAWS = 4.0, 3
"""If rounding alone moves a copy by more (Gemma 3n, which clips activations at a quantile), the bound is this factor
times the movement of the plain forward pass when each weight changes by one unit in the last place, the largest of this
many draws."""


class NotOffered(Exception):
    """The engine does not use this way with this model; the message has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The result of one way of computing an architecture."""

    way: str
    largest: float | None = None
    """Nats, the largest distance from the plain forward pass; None: it raised before."""
    bound: float = BOUND
    """Nats, the largest distance that rounding explains."""
    error: str | None = None
    """The error it raised, or why the way is not offered."""
    is_offered: bool = True
    """False: the engine uses another way with this model by default."""

    @property
    def is_right(self) -> bool:
        return self.error is None and self.largest is not None and self.largest <= self.bound

    @property
    def reason(self) -> str | None:
        """Why the way cannot be used; None: it can."""
        if self.is_right:
            return None
        return self.error or f"log-probabilities are up to {self.largest:.2g} nats off those of the model itself"


def probe_refusal(config: Any, ways: Sequence[str], *, num_tokens: int) -> str | None:
    """Why a model cannot be computed in some of `WAYS`; None if it can, in all of them.

    Args:
        config: transformers' config of the full-size model.
        num_tokens: the longest prompt and completion together.
    """
    if (state := recurrent_state(config)) is not None:
        return f"{state}, which padded prompts and prompts shared by completions would get wrong"
    if (limit := rope_limit(config)) is not None and num_tokens > limit:
        return (
            f"its rope depends on a sequence's length beyond {limit} tokens, and sequences of a batch differ: "
            f"prompt and completion may have {num_tokens}"
        )
    key = (type(config), json.dumps(config.to_dict(), sort_keys=True, default=str), *ways)
    if key not in _REFUSALS:
        _REFUSALS[key] = _refusal_of_probe(config, ways)
    return _REFUSALS[key]


_REFUSALS: dict[tuple[object, ...], str | None] = {}
"""Results of earlier probes in this process, by config and ways."""


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppresses transformers' warnings about the small copy, which do not concern the user's model."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _refusal_of_probe(config: Any, ways: Sequence[str]) -> str | None:
    try:
        with _without_warnings():
            probes = probe_architecture(config, ways)
    except NoSmallCopy as error:
        return f"it could not be tried: {error}"
    wrong = next((probe for probe in probes.values() if probe.is_offered and not probe.is_right), None)
    if wrong is None:
        return None
    return f"{NAMES[wrong.way]} computes it wrongly: {wrong.reason}{REMEDIES.get(wrong.way, '')}"


def recurrent_state(config: Any) -> str | None:
    """The state that an architecture keeps besides the keys and values of each token; None: no such state."""
    from transformers import DynamicCache

    model_class: Any = auto_class(config)._model_mapping[type(config)]
    name = model_class.__name__
    if getattr(model_class, "_is_stateful", False):
        return f"{name} keeps a recurrent state"
    kinds = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers} - CACHE_LAYERS)
    if any(kind.startswith("LinearAttention") for kind in kinds):
        return f"{name} has layers with a recurrent or convolutional state ({kinds[0]})"
    return f"{name} has layers that choose keys by an index of their own ({', '.join(kinds)})" if kinds else None


def rope_limit(config: Any) -> int | None:
    """The sequence length beyond which a model's rope depends on the length; None: it never does."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    limits = []
    for one in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = str(one.get("rope_type", one.get("type", "")))
        if "dynamic" in kind:
            limits.append(text.max_position_embeddings)
        if kind == "longrope":
            limit = one.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            limits.append(limit or text.max_position_embeddings)
    return min(limits, default=None)


def probe_architecture(config: Any, ways: Sequence[str], *, seed: int = 4) -> dict[str, ProbeResult]:
    """Tests some of `WAYS` with a small copy.

    Args:
        seed: seed of its weights.
    Raises: NoSmallCopy.
    """
    model = small_model(small_config(config), seed=seed)
    try:
        _plain_logits(model, _tokens(3, seed=0))
    except Exception as error:  # modeling code may raise anything
        raise NoSmallCopy(f"its small copy cannot compute: {one_line(error)}") from error
    bound = max(BOUND, ROUNDING_FACTOR * _rounding(model))
    return {way: _probe(model, way, bound) for way in ways}


@torch.no_grad()
def _probe(model: Any, way: str, bound: float) -> ProbeResult:
    try:
        return ProbeResult(way=way, bound=bound, largest=WAYS[way](model))
    except NotOffered as error:
        return ProbeResult(way=way, error=str(error), is_offered=False)
    except Exception as error:  # noqa: BLE001 - as above
        return ProbeResult(way=way, error=one_line(error))


@torch.no_grad()
def _rounding(model: Any) -> float:
    """Nats by which log-probabilities move when each weight moves by one unit in the last place."""
    token_ids, weights = _tokens(max(PROMPT_LENGTHS) + NUM_TOKENS, seed=0), list(model.parameters())
    plain = _plain_logits(model, token_ids).log_softmax(-1)
    before, largest = [weight.clone() for weight in weights], 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_DRAWS):
        for weight, value in zip(weights, before, strict=True):
            signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            weight.copy_(value * (1 + signs * torch.finfo(torch.float32).eps))
        largest = _larger(largest, plain, _plain_logits(model, token_ids).log_softmax(-1))
    for weight, value in zip(weights, before, strict=True):
        weight.copy_(value)
    return largest


def _plain_logits(model: Any, token_ids: Tensor) -> Tensor:
    """[L, V] of one sequence [L]."""
    with torch.no_grad():
        return model(input_ids=token_ids[None], use_cache=False).logits[0].float()


def _plain_logprobs(model: Any, prompt: Tensor, completion: Tensor) -> Tensor:
    logits = _plain_logits(model, torch.cat([prompt, completion]))[len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]


def _tokens(length: int, *, seed: int) -> Tensor:
    return torch.randint(FIRST_TOKEN, 40, (length,), generator=torch.Generator().manual_seed(seed))


def _prompts() -> list[Prompt]:
    return [
        Prompt(index=i, token_ids=_tokens(length, seed=i), reference_answer="")
        for i, length in enumerate(PROMPT_LENGTHS)
    ]


def _engine(model: Any, **options: Any) -> float:
    """Samples with the Hugging Face engine; with refill, later prompts start while the first run."""
    loaded = LoadedModel(model=model, tokenizer=None, stop_ids=(-1,), pad_id=0)
    engine = HuggingFaceEngine(loaded, CPU, max_prompt_tokens=WIDTH, **options)
    sampling = SamplingSettings(group_size=GROUP_SIZE, max_new_tokens=NUM_TOKENS)
    prompts, largest = _prompts(), 0.0
    waiting, num_done = list(prompts), 0
    while num_done < len(prompts) * GROUP_SIZE:
        while waiting and engine.free_capacity(GROUP_SIZE) > 0:
            engine.submit([waiting.pop(0)], sampling, seed=0, step=0)
        for completions in engine.finished():
            for token_ids, logprobs in zip(completions.token_ids, completions.logprobs, strict=True):
                plain = _plain_logprobs(model, prompts[completions.index].token_ids, token_ids)
                largest = _larger(largest, plain, logprobs)
            num_done += len(completions.token_ids)
    return largest


def _replayed(model: Any) -> float:
    """Samples with the Hugging Face engine, and computes the completions with the experts that it recorded."""
    loaded = LoadedModel(model=model, tokenizer=None, stop_ids=(-1,), pad_id=0)
    engine, prompts = HuggingFaceEngine(loaded, CPU, max_prompt_tokens=WIDTH), _prompts()
    sampling = SamplingSettings(group_size=GROUP_SIZE, max_new_tokens=NUM_TOKENS, records_experts=True)
    engine.submit(prompts, sampling, seed=0, step=0)
    open_groups = OpenGroups(GROUP_SIZE)
    open_groups.open(prompts)
    return _actor(model, _packed_with_experts, open_groups.add(engine.finished()))


def _packed_with_experts(model: Any, groups: Sequence[SampleGroup]) -> Sequence[Tensor]:
    experts = pack_without_padding(groups).experts
    assert experts is not None, "they were recorded"
    with replayed_experts(model, experts):
        return _packed(model, groups)


def _graphs(model: Any) -> float:
    """Computes, without capturing, the steps that a GPU would capture as graphs."""
    from rlinf_workers.engines.huggingface.graphs import FixedDecoder
    from rlinf_workers.engines.sampling import NoiseKey, prompt_noise

    if (reason := why_not(model)) is not None:
        raise NotOffered(reason)
    loaded = LoadedModel(model=model, tokenizer=None, stop_ids=(-1,), pad_id=0)
    engine = HuggingFaceEngine(loaded, CPU, max_prompt_tokens=WIDTH)
    decoder = FixedDecoder(model, engine._prefill, CPU, stop_ids=torch.tensor([-1]), pad_id=0, captures=False)
    prompts, sampling = _prompts(), SamplingSettings(group_size=GROUP_SIZE, max_new_tokens=NUM_TOKENS)
    noise = prompt_noise([NoiseKey(seed=0, step=0, index=prompt.index) for prompt in prompts], sampling)
    token_ids, logprobs, _, _ = decoder.generate(prompts, *engine._pad(prompts, len(prompts)), noise, sampling)
    largest = 0.0
    for row, (ids, row_logprobs) in enumerate(zip(token_ids, logprobs, strict=True)):
        largest = _larger(largest, _plain_logprobs(model, prompts[row // GROUP_SIZE].token_ids, ids), row_logprobs)
    return largest


def _actor(
    model: Any,
    answers: Callable[[Any, Sequence[SampleGroup]], Sequence[Tensor]],
    groups: Sequence[SampleGroup] | None = None,
) -> float:
    """Computes log-probabilities of groups, by default of fixed completions of different lengths; the last group is
    then an episode of two branches, which have gaps without a loss."""
    groups = [*_completions(), _branched()] if groups is None else groups
    rows = [
        (group.prompt.token_ids, ids[:length], mask[:length] != 0)
        for group in groups
        for ids, mask, length in zip(group.completion_ids, group.loss_mask, group.extents.tolist(), strict=True)
    ]
    largest = 0.0
    for (prompt, completion, has_loss), logits in zip(rows, answers(model, groups), strict=True):
        logprobs = logits.float().log_softmax(-1).gather(-1, completion[has_loss, None])[:, 0]
        largest = _larger(largest, _plain_logprobs(model, prompt, completion)[has_loss], logprobs)
    return largest


def _completions() -> list[SampleGroup]:
    mask = (torch.arange(NUM_TOKENS) < torch.tensor(COMPLETION_LENGTHS)[:, None]).float()
    return [
        SampleGroup(
            prompt=prompt,
            completion_ids=torch.stack(
                [_tokens(NUM_TOKENS, seed=10 * prompt.index + member + 1) for member in range(len(mask))]
            ),
            loss_mask=mask,
            rollout_logprobs=torch.zeros_like(mask),
            policy_version=0,
        )
        for prompt in _prompts()
    ]


def _branched() -> SampleGroup:
    """Two rows, of which the second shares all but the last tokens of the first. Short, since some architectures allow
    no more positions in the packed row."""
    num_shared = BRANCHED_TOKENS - 5
    ids = _tokens(BRANCHED_TOKENS, seed=100).repeat(2, 1)
    ids[1, num_shared:] = _tokens(BRANCHED_TOKENS - num_shared, seed=101)
    mask = torch.ones(2, BRANCHED_TOKENS)
    mask[:, 3:6] = mask[1, :num_shared] = mask[1, -4:-2] = 0
    return SampleGroup(
        prompt=Prompt(index=len(PROMPT_LENGTHS), token_ids=_tokens(2, seed=102), reference_answer=""),
        completion_ids=ids,
        loss_mask=mask,
        rollout_logprobs=torch.zeros_like(mask),
        policy_version=0,
        lengths=torch.full((2,), BRANCHED_TOKENS),
        trajectories=torch.zeros(2, dtype=torch.int64),
        shared=torch.tensor([0, num_shared]),
        shared_with=torch.tensor([-1, 0]),
    )


def _padded(model: Any, groups: Sequence[SampleGroup]) -> list[Tensor]:
    batch = pack_groups(groups)
    logits = completion_logits(model, batch)
    return [row[mask != 0] for row, mask in zip(logits, batch.loss_mask, strict=True)]


def _packed(model: Any, groups: Sequence[SampleGroup]) -> Sequence[Tensor]:
    sizes = torch.cat([group.loss_mask.sum(-1) for group in groups]).int().tolist()
    return packed_logits(model, pack_without_padding(groups)).split(sizes)


def _larger(largest: float, plain: Tensor, logprobs: Tensor) -> float:
    if plain.shape != logprobs.shape:
        raise ValueError(f"{tuple(logprobs.shape)} log-probabilities for {tuple(plain.shape)} tokens")
    distance = (plain - logprobs).abs().max().item()
    return distance if not distance <= largest else largest  # NaN stays


WAYS: Mapping[str, Callable[[Any], float]] = {
    "engine": _engine,
    "refill": partial(_engine, refill=True, max_batch_sequences=4),
    "graphs": _graphs,
    "actor": partial(_actor, answers=_padded),
    "packed": partial(_actor, answers=_packed),
    "replay": _replayed,
}
"""engine: the Hugging Face engine in batches; refill: the same with continuous batching (slots.py); graphs: the steps
it captures as CUDA graphs (graphs.py); actor: padded micro-batches; packed: micro-batches without padding;
replay: these with the experts of the engine."""
REMEDIES = {
    "refill": "; leave engine_options.refill out",
    "graphs": "; set engine_options.cuda_graphs=false",
    "packed": "; leave max_tokens_per_micro_batch out",
    "replay": "; leave actor.router_replay out",
}
NAMES = {
    "engine": "the Hugging Face engine",
    "refill": "the Hugging Face engine with refill",
    "graphs": "the Hugging Face engine with CUDA graphs",
    "actor": "the actor",
    "packed": "the actor with packed sequences",
    "replay": "the actor with router replay",
}
"""Names used in messages."""

"""The conformance suite of generation engines, for custom and shipped ones.

    @pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
    def test_my_engine_conforms(check, tmp_path):
        model = tiny_model(tmp_path)
        check(functools.partial(MyEngine, model, torch.device("cpu")), model)

A check takes a function that creates an engine of `model` from max_prompt_tokens and max_batch_sequences, and compares
it with the same model in transformers. It raises AssertionError with the expected and the actual value.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from rlinf_comm.weights import Layout, ReshardPlan, execute, reshard_plan, specs_of
from rlinf_workers.engines.base import Completions, GenerationEngine, RemoteWeights
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.models.language_model import ModelSettings, build_model, load_tokenizer, stop_token_ids
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.testing.architectures import write_tokenizer
from rlinf_workers.weight_sync.base import WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

MakeEngine = Callable[..., GenerationEngine]

WIDTH = 8
MAX_SEQUENCES = 16
LOGPROB_BOUND = 1e-4
"""Nats between the engine's float32 log-probability of a token and that of a plain forward."""
FREQUENCY_BOUND = 0.12
"""At most five standard deviations of a token's share in 512 samples."""
FIRST_PROMPT = torch.tensor([4, 7, 2])
GREEDY = SamplingSettings(group_size=1, max_new_tokens=6, temperature=0.0)
SAMPLING = SamplingSettings(group_size=4, max_new_tokens=6)


def tiny_model(folder: Path, *, hidden_size: int = 32) -> ModelSettings:
    """Writes a Qwen2 of two layers and four heads, with weights and a tokenizer of single characters."""
    from transformers import Qwen2Config

    vocabulary = write_tokenizer(folder)
    Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    ).save_pretrained(folder)
    settings = ModelSettings(folder=str(folder), has_weights=False, seed=3)
    build_model(settings, torch.device("cpu")).save_pretrained(folder)
    return replace(settings, has_weights=True)


def tiny_mixture(folder: Path, *, hidden_size: int = 32) -> ModelSettings:
    """Writes a Qwen3 mixture of experts with the sizes and the tokenizer of `tiny_model`, for sequences of up to 512
    tokens."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    settings = tiny_model(folder, hidden_size=hidden_size)
    sizes = json.loads((folder / "config.json").read_text())
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{key: sizes[key] for key in keys},
        **{"head_dim": sizes["hidden_size"] // sizes["num_attention_heads"], "pad_token_id": 0, "bos_token_id": None},
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return settings


def prompts_of(lengths: Sequence[int], *, first: int = 0) -> list[Prompt]:
    """Prompts of those lengths, from the digits of `tiny_model`, numbered from `first`."""
    generator = torch.Generator().manual_seed(1)
    return [
        Prompt(index=first + i, token_ids=torch.randint(2, 13, (length,), generator=generator), reference_answer=f"{i}")
        for i, length in enumerate(lengths)
    ]


def sample(
    engine: GenerationEngine, prompts: Sequence[Prompt], sampling: SamplingSettings = SAMPLING, *, step: int = 0
) -> list[Completions]:
    """Generates all prompts as the rollout stage does; each completion comes back once."""
    waiting, missing, completions = list(prompts), {}, []
    while waiting or missing:
        while waiting and (room := engine.free_capacity(sampling.group_size)) > 0:
            now, waiting = waiting[:room], waiting[room:]
            engine.submit(now, sampling, seed=1, step=step)
            missing.update({prompt.index: set(range(sampling.group_size)) for prompt in now})
        assert missing, "the engine is idle, but free_capacity() is 0"
        finished = engine.finished()
        assert finished, f"finished() returned nothing while {len(missing)} prompts are in flight"
        for part in finished:
            left, members = missing.get(part.index, set()), set(part.members)
            assert members and members <= left and len(members) == len(part.members), (
                f"prompt {part.index}: completions {part.members} came back, and {sorted(left)} are in flight"
            )
            missing[part.index] = left - members
            if not missing[part.index]:
                del missing[part.index]
        completions += finished
    return completions


def _check(do: Callable[[GenerationEngine, Any, ModelSettings], None]) -> Callable[[MakeEngine, ModelSettings], None]:
    """Turns a function of an engine and a reference (the model in transformers) into a check."""

    @functools.wraps(do)
    def check(make: MakeEngine, model: ModelSettings) -> None:
        engine = make(max_prompt_tokens=WIDTH, max_batch_sequences=MAX_SEQUENCES)
        do(engine, build_model(model, torch.device("cpu")), model)
        engine.close()

    return check


@_check
def check_every_completion_comes_back_once(engine: GenerationEngine, reference: Any, model: ModelSettings) -> None:
    """Accepts more prompts than its capacity over time, of all lengths; afterwards nothing is left."""
    sample(engine, prompts_of([1, 8, 3, 5, 8, 2, 7, 4, 6, 8, 1]))
    assert engine.finished() == [], "finished() returns completions while nothing is in flight"


@_check
def check_rows(engine: GenerationEngine, reference: Any, model: ModelSettings) -> None:
    """Shapes and types; a row ends at its stop token or is truncated; values after its end are masked."""
    stops = stop_token_ids(model.folder, load_tokenizer(model.folder))
    for part in sample(engine, prompts_of([8] * 16)):
        num_rows, num_tokens = len(part.members), part.token_ids.shape[1]
        assert num_tokens <= SAMPLING.max_new_tokens, f"{num_tokens} tokens; max_new_tokens={SAMPLING.max_new_tokens}"
        for name, shape, dtype in (
            ("token_ids", (num_rows, num_tokens), torch.int64),
            ("loss_mask", (num_rows, num_tokens), torch.float32),
            ("logprobs", (num_rows, num_tokens), torch.float32),
            ("truncated", (num_rows,), torch.bool),
        ):
            tensor = getattr(part, name)
            actual = (tuple(tensor.shape), tensor.dtype, tensor.device.type)
            assert actual == (shape, dtype, "cpu"), f"{name}: {actual}, not {(shape, dtype, 'cpu')}"
        for ids, mask, logprobs, truncated in zip(
            part.token_ids.tolist(), part.loss_mask.tolist(), part.logprobs, part.truncated.tolist(), strict=True
        ):
            length = int(sum(mask))
            assert mask == [1.0] * length + [0.0] * (num_tokens - length), f"loss_mask {mask}"
            ends = [token in stops for token in ids[:length]]
            assert length > 0 and not any(ends[:-1]), f"tokens {ids[:length]} go on behind a stop token of {stops}"
            assert truncated != ends[-1], f"tokens {ids[:length]}, truncated={truncated}, stop tokens {stops}"
            assert ends[-1] or length == SAMPLING.max_new_tokens, f"{length} tokens, truncated before max_new_tokens"
            assert (logprobs[:length] <= 0).all() and (logprobs[length:] == 0).all(), f"logprobs {logprobs}"
        assert part.policy_version == -1, f"version {part.policy_version} before any weights were received"


@_check
def check_logprobs(engine: GenerationEngine, reference: Any, model: ModelSettings) -> None:
    """Log-probabilities equal those of a plain forward pass, of the full distribution at the temperature."""
    prompts = prompts_of([3, 8, 5])
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (2.0, 0.7)):
        for part in sample(engine, prompts, replace(SAMPLING, temperature=temperature, top_p=top_p)):
            prompt = prompts[part.index].token_ids
            for ids, mask, logprobs in zip(part.token_ids, part.loss_mask.bool(), part.logprobs, strict=True):
                scores = _logits(reference, torch.cat([prompt, ids[mask]]))[len(prompt) - 1 : -1] / temperature
                expected = scores.log_softmax(-1).gather(-1, ids[mask][:, None])[:, 0]
                worst = float((logprobs[mask] - expected).abs().max())
                assert worst <= LOGPROB_BOUND, f"temperature {temperature}, top_p {top_p}: off by {worst} nats"


@_check
def check_frequencies(engine: GenerationEngine, reference: Any, model: ModelSettings) -> None:
    """First tokens have the frequencies of the temperature, and none is outside top_p."""
    _send_other_weights(engine, reference)
    ordered = _first_token_shares(reference, temperature=0.5).sort(descending=True).values
    _assert_drawn(engine, reference, int((ordered.cumsum(-1) - ordered < 0.9).sum()), temperature=0.5, top_p=0.9)


@_check
def check_top_k(engine: GenerationEngine, reference: Any, model: ModelSettings) -> None:
    """First tokens are among the `top_k` most likely, of those the ones that top_p and min_p leave, with the right
    frequencies."""
    _send_other_weights(engine, reference)
    _assert_drawn(engine, reference, 3, temperature=2.0, top_k=3)
    shares = _first_token_shares(reference, temperature=2.0).sort(descending=True).values
    first, second, third = shares[:3].tolist()
    _assert_drawn(engine, reference, 2, temperature=2.0, top_k=5, top_p=first + second / 2)
    _assert_drawn(engine, reference, 1, temperature=2.0, top_k=1)
    _assert_drawn(engine, reference, 2, temperature=2.0, top_k=5, min_p=(second + third) / 2 / first)


@_check
def check_stop_strings(engine: GenerationEngine, reference: Any, model: ModelSettings) -> None:
    """A completion ends with the first token that completes a stop string in its text, while others continue. It
    includes the string, is not truncated, and keeps its log-probabilities."""
    _send_other_weights(engine, reference)
    tokenizer, prompts = load_tokenizer(model.folder), prompts_of([3, 8, 5, 1, 4, 6])
    whole = {part.index: part for part in sample(engine, prompts, GREEDY)}
    texts = {index: tokenizer.decode(part.token_ids[0, :4]) for index, part in whole.items()}
    stop = texts[0][1:3]
    assert len(stop) == 2, f"the first tokens of prompt 0 say {texts[0]!r}, which cannot be stopped in the middle"
    for part in sample(engine, prompts, replace(GREEDY, stop=(stop, "nowhere"))):
        full = whole[part.index]
        length = int(full.loss_mask.sum())
        ends = (n for n in range(1, length + 1) if stop in tokenizer.decode(full.token_ids[0, :n]))
        end = next(ends, length)
        ids = part.token_ids[0][part.loss_mask[0].bool()].tolist()
        assert ids == full.token_ids[0, :end].tolist(), f"{ids}, not {full.token_ids[0, :end].tolist()} ({stop!r})"
        assert bool(part.truncated[0]) == (bool(full.truncated[0]) and stop not in tokenizer.decode(ids))
        worst = float((part.logprobs[0, :end] - full.logprobs[0, :end]).abs().max())
        assert worst <= LOGPROB_BOUND, f"log-probabilities are off by {worst} nats"
        assert not part.logprobs[0, end:].any(), f"logprobs {part.logprobs} after the stop string"


@_check
def check_room(engine: GenerationEngine, reference: Any, model: ModelSettings) -> None:
    """It accepts `free_capacity` prompts, also while earlier ones are in flight, and never exceeds its maximum."""
    for group_size, most in ((1, MAX_SEQUENCES), (4, MAX_SEQUENCES // 4), (MAX_SEQUENCES + 1, 1)):
        room = engine.free_capacity(group_size)
        assert 1 <= room <= most, f"room for {room} prompts of {group_size} completions, of {MAX_SEQUENCES} at once"
    waiting, size = prompts_of([3] * 64), SAMPLING.group_size
    while waiting and (room := engine.free_capacity(size)) > 0:
        engine.submit(waiting[:room], SAMPLING, seed=1, step=0)
        waiting = waiting[room:]
    num_taken, num_back = 64 - len(waiting), 0
    assert num_taken <= MAX_SEQUENCES // size, f"room for {num_taken} prompts before one came back"
    while parts := engine.finished():
        num_back += sum(len(part.members) for part in parts)
    assert num_back == num_taken * size, f"{num_back} completions of {num_taken} prompts came back"
    assert engine.free_capacity(size) > 0, "no room once everything came back"


@_check
def check_weights(engine: GenerationEngine, reference: Any, model: ModelSettings) -> None:
    """Temperature 0 gives the tokens of `model.generate`. Weights filled in place through the layout are served after
    `weights_received`, with their version."""
    prompts = prompts_of([3, 8, 5, 1])
    _assert_greedy(reference, prompts, sample(engine, prompts, GREEDY))
    _send_other_weights(engine, reference)
    parts = sample(engine, prompts, GREEDY)
    _assert_greedy(reference, prompts, parts)
    assert {part.policy_version for part in parts} == {5}


@_check
def check_offload(engine: GenerationEngine, reference: Any, model: ModelSettings) -> None:
    """Completions in flight wait while the state is offloaded; weights received before are kept."""
    _send_other_weights(engine, reference)
    prompts = prompts_of([4])
    engine.submit(prompts, GREEDY, seed=1, step=0)
    engine.offload()
    engine.onload()
    _assert_greedy(reference, prompts, engine.finished())
    _assert_greedy(reference, prompts, sample(engine, prompts, GREEDY))


ENGINE_CHECKS = (
    check_every_completion_comes_back_once,
    check_rows,
    check_logprobs,
    check_frequencies,
    check_top_k,
    check_stop_strings,
    check_room,
    check_weights,
    check_offload,
)
"""Every engine must pass all of these."""


def _logits(reference: Any, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference(input_ids=token_ids[None]).logits[0].float()


def _first_token_shares(reference: Any, *, temperature: float) -> torch.Tensor:
    return (_logits(reference, FIRST_PROMPT)[-1] / temperature).softmax(-1)


def _assert_drawn(engine: GenerationEngine, reference: Any, num_kept: int, **sampling: Any) -> None:
    """First tokens are the `num_kept` most likely, each with its expected frequency."""
    settings = SamplingSettings(group_size=MAX_SEQUENCES, max_new_tokens=1, **sampling)
    prompts = [replace(one, token_ids=FIRST_PROMPT) for one in prompts_of([3] * (512 // MAX_SEQUENCES))]
    drawn = torch.cat([part.token_ids[:, 0] for part in sample(engine, prompts, settings)])
    shares = _first_token_shares(reference, temperature=settings.temperature)
    likeliest = shares.argsort(descending=True)[:num_kept]
    expected = torch.zeros_like(shares).scatter(-1, likeliest, shares[likeliest] / shares[likeliest].sum())
    rates = torch.bincount(drawn, minlength=len(expected)) / len(drawn)
    assert not rates[expected == 0].any(), f"{sampling}: drawn {rates.tolist()}, not {expected.tolist()}"
    worst = float((rates - expected).abs().max())
    assert worst <= FREQUENCY_BOUND, f"{sampling}: shares {rates.tolist()} of the first tokens, not {expected.tolist()}"


def _send_other_weights(engine: GenerationEngine, reference: Any) -> None:
    """Gives the reference weights with clear preferences, and syncs them to the engine as version 5, straight into its
    tensors through its layout."""
    generator = torch.Generator().manual_seed(5)
    weights = {name: tensor.detach() for name, tensor in reference.named_parameters()}
    for tensor in weights.values():
        if tensor.dim() > 1:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    specs = specs_of(weights)
    reshard = reshard_plan(Layout.replicated(specs, 1), engine.layout().with_dtypes_of(specs))
    if isinstance(engine, RemoteWeights):
        _send_elsewhere(engine, weights, reshard, 5)
    else:
        execute(reshard, [weights], [engine.weights()])
    engine.weights_received(5)


def _send_elsewhere(
    engine: RemoteWeights, weights: dict[str, torch.Tensor], reshard: ReshardPlan, version: int
) -> None:
    sync = SharedWeightSync("reference -> engine", reshard)

    def port(side: Literal["send", "receive"], rank: int) -> WeightPort:
        return WeightPort(
            edge="reference -> engine",
            side=side,
            rank=rank,
            reshard=reshard,
            weight_sync="shared",
            address=sync.address,
        )

    sender = SharedWeightSync.open_sender(port("send", 0))
    receiver = engine.open_receiver([port("receive", rank) for rank in range(reshard.num_dst_ranks)])
    sender.publish(weights, version)
    if (check := receiver.receive({}, version)) is not None:
        check()


def _assert_greedy(reference: Any, prompts: Sequence[Prompt], parts: Sequence[Completions]) -> None:
    assert parts, "no completion came back"
    for part in parts:
        ids = prompts[part.index].token_ids[None]
        sequences = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY.max_new_tokens
        )
        expected = sequences[0, ids.shape[1] :].tolist()
        for row, mask in zip(part.token_ids, part.loss_mask, strict=True):
            assert row[mask.bool()].tolist() == expected, f"greedy tokens {row.tolist()}, not {expected}"

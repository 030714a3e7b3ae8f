"""Turns that are kept: the same bits whatever is kept, fewer tokens to compute, bounded memory."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.engines.huggingface import kept
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.huggingface.kept import KeptTurns
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.models.language_model import load_model
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.roles.records.pictures import pictures_of
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.engines import ENGINE_CHECKS, LOGPROB_BOUND, prompts_of, sample
from rlinf_workers.testing.pictures import END, START, prompt_with_pictures, random_picture, tiny_vision_language

CPU = torch.device("cpu")
TURN = SamplingSettings(group_size=1, max_new_tokens=20)
ADDED = [[3, 4, 5], [7], [2, 9, 9, 4, 3, 3, 8, 5, 6, 7, 2, 4, 5, 3, 9, 8, 7, 2, 3]]


def engine(model, **changes):
    return HuggingFaceEngine(model, CPU, max_prompt_tokens=160, refill=True, **changes)


def conversations(hf_engine, num_tokens=(5, 17, 2, 33)):
    """Four turns of several conversations; returns the tokens and log-probabilities of each turn."""
    histories = [one.token_ids for one in prompts_of(list(num_tokens))]
    turns = []
    for number in range(4):
        prompts = [Prompt(index=10 * number + i, token_ids=ids, reference_answer="") for i, ids in enumerate(histories)]
        for part in sorted(sample(hf_engine, prompts, TURN), key=lambda part: part.index):
            i = part.index % 10
            turns.append((part.token_ids[0], part.logprobs[0]))
            histories[i] = torch.cat([histories[i], part.token_ids[0], torch.tensor(ADDED[number % len(ADDED)])])
    return turns, histories


def kept_of(hf_engine) -> KeptTurns:
    turns = hf_engine._slots._kept
    assert turns is not None
    return turns


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_it_conforms(check, model):
    check(partial(HuggingFaceEngine, model, CPU, refill=True, keep_turns=True), model)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "gemma"])
def test_what_is_kept_changes_no_bit(name, tmp_path, monkeypatch):
    model = tiny_architecture(name, tmp_path, max_position_embeddings=512)
    keeping = engine(model, keep_turns=True)
    turns, _ = conversations(keeping)
    assert kept_of(keeping).num_kept > 2 * kept_of(keeping).num_computed > 0
    monkeypatch.setattr(KeptTurns, "add", lambda *_: None)
    monkeypatch.setattr(kept, "TOKENS_AT_ONCE", 21)
    again, _ = conversations(engine(model, keep_turns=True, max_batch_sequences=3))
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(turns, again, strict=True):
        assert_bitwise_equal(ids, expected_ids)
        assert_bitwise_equal(logprobs, expected_logprobs)


@pytest.mark.parametrize("heads", [(4, 2, 8), (6, 1, 64), (8, 2, 64)], ids=str)
def test_long_conversations_have_the_same_bits(tmp_path, heads, monkeypatch):
    num_heads, num_kv_heads, size = heads
    model = tiny_architecture(
        "llama",
        tmp_path,
        hidden_size=num_heads * size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=size,
        max_position_embeddings=1024,
    )
    make = partial(HuggingFaceEngine, model, CPU, max_prompt_tokens=900, refill=True, keep_turns=True)
    turns, _ = conversations(make(), (600, 40, 511))
    monkeypatch.setattr(KeptTurns, "add", lambda *_: None)
    again, _ = conversations(make(max_batch_sequences=2), (600, 40, 511))
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(turns, again, strict=True):
        assert_bitwise_equal(ids, expected_ids)
        assert_bitwise_equal(logprobs, expected_logprobs)


def test_the_tokens_are_those_without_the_option(model):
    turns, histories = conversations(engine(model, keep_turns=True))
    expected_turns, expected_histories = conversations(engine(model))
    for history, expected in zip(histories, expected_histories, strict=True):
        assert history.tolist() == expected.tolist()
    for (_, logprobs), (_, expected) in zip(turns, expected_turns, strict=True):
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=LOGPROB_BOUND)


def with_picture(prompt, index, token_ids, picture=None):
    """The prompt followed by tokens and a picture, if there is one."""
    own = prompt.pictures
    placed = [] if own is None else list(zip(own.begins, own.pictures, strict=True))
    whole = [*prompt.token_ids.tolist(), *token_ids]
    if picture is not None:
        placed.append((len(whole) + 1, picture))
        whole += [START, *picture.token_ids.tolist(), END]
    return replace(prompt, index=index, token_ids=torch.tensor(whole), pictures=pictures_of(placed))


def seeing_conversations(hf_engine, model):
    """Four turns of three conversations: two with equal tokens and other pictures, and one that is text at first. Every
    second turn follows another picture, the last one a video."""
    generator = torch.Generator().manual_seed(3)
    sizes = [[(3, 4)], [(3, 4)], []]
    prompts = [prompt_with_pictures(model, index, size, num_words=3) for index, size in enumerate(sizes)]
    turns = []
    for number in range(4):
        size = (2, 2, 3) if number == 3 else (2, 3)
        pictures = [random_picture(model, size, generator) for _ in prompts]
        for part in sorted(sample(hf_engine, prompts, replace(TURN, max_new_tokens=4)), key=lambda part: part.index):
            turns.append((part.token_ids[0], part.logprobs[0]))
            i, picture = part.index % 10, pictures[part.index % 10] if number % 2 else None
            prompts[i] = with_picture(
                prompts[i], 10 * number + 10 + i, [*part.token_ids[0].tolist(), *ADDED[number % 3]], picture
            )
    return turns


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_turns_with_pictures_are_kept_and_change_no_bit(name, tmp_path, monkeypatch):
    """Also where a forward pass computes a part of a picture."""
    loaded = load_model(tiny_vision_language(name, tmp_path))
    keeping = engine(loaded, keep_turns=True)
    turns = seeing_conversations(keeping, loaded.model)
    assert kept_of(keeping).num_kept > kept_of(keeping).num_computed > 0
    expected = seeing_conversations(engine(loaded), loaded.model)
    monkeypatch.setattr(KeptTurns, "add", lambda *_: None)
    monkeypatch.setattr(kept, "TOKENS_AT_ONCE", 21)
    again = seeing_conversations(engine(loaded, keep_turns=True, max_batch_sequences=2), loaded.model)
    for (ids, logprobs), (ids_again, logprobs_again), (_, whole) in zip(turns, again, expected, strict=True):
        assert_bitwise_equal(ids, ids_again)
        assert_bitwise_equal(logprobs, logprobs_again)
        torch.testing.assert_close(logprobs, whole, rtol=0, atol=LOGPROB_BOUND)
    assert not torch.equal(turns[0][1], turns[1][1]), "the picture matters"


def test_new_weights_forget_what_is_kept(model):
    hf_engine = engine(model, keep_turns=True)
    conversations(hf_engine)
    assert kept_of(hf_engine).num_bytes > 0
    hf_engine.weights_received(1)
    assert kept_of(hf_engine).num_bytes == 0 and kept_of(hf_engine).longest(torch.tensor([5, 5]))[0] == 0


def test_memory_is_bounded_by_that_of_the_rows(model):
    hf_engine = engine(model, keep_turns=True, max_batch_sequences=8)
    for first in range(0, 120, 40):
        sample(hf_engine, prompts_of([40] * 40, first=first), replace(TURN, max_new_tokens=100))
        cache = hf_engine._slots._cache
        rows = sum(layer.nbytes for layer in (*cache.keys, *cache.values))
        assert rows / 4 < kept_of(hf_engine).num_bytes <= rows
        assert kept_of(hf_engine).num_bytes == sum(
            layer.nbytes for kept_turn in kept_of(hf_engine)._turns.values() for layers in kept_turn for layer in layers
        )


def test_turns_are_kept_with_refill_only(model):
    with pytest.raises(ValueError, match=r"keep_turns needs continuous batching"):
        HuggingFaceEngine(model, CPU, max_prompt_tokens=8, keep_turns=True)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
)
def test_the_longest_beginning_is_found(sequences, prompt_ids):
    config = SimpleNamespace(hidden_size=32, intermediate_size=64, head_dim=32)
    turns = KeptTurns(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config)), max_bytes=1 << 20)
    for sequence in sequences:
        layer = torch.tensor(sequence, dtype=torch.float32)[None, :, None]
        turns.add(torch.tensor(sequence), [layer], [layer + 1])
    length, keys, values = turns.longest(torch.tensor(prompt_ids))
    shared = [
        next(
            (i for i, (a, b) in enumerate(zip(one, prompt_ids, strict=False)) if a != b), min(len(one), len(prompt_ids))
        )
        for one in sequences
    ]
    assert length == max(shared, default=0)
    if length:
        assert keys[0][0, :length, 0].tolist() == prompt_ids[:length]
        assert values[0][0, :length, 0].tolist() == [token + 1 for token in prompt_ids[:length]]

"""Rows that are refilled: the tokens are those of whole batches, nobody's numbers depend on who runs beside, rows go on
at once to who waits, and memory bounds their number."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from rlinf_comm.testing import assert_bitwise_equal
from rlinf_sched.derive import JobShape, Lengths, ModelShape
from rlinf_workers.engines.huggingface import slots
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.huggingface.slots import Slots
from rlinf_workers.engines.huggingface.spec import SPEC
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.errors import WorkersError
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.engines import ENGINE_CHECKS, LOGPROB_BOUND, prompts_of, sample

CPU = torch.device("cpu")
MIXED = [3, 8, 5, 7, 8, 2, 4, 6, 8, 1, 5, 3]
LONG = SamplingSettings(group_size=4, max_new_tokens=40)


def engine(model, *, width: int | None = 8, refill: bool = True, **changes):
    return HuggingFaceEngine(model, CPU, max_prompt_tokens=width, refill=refill, **changes)


def slots_of(hf_engine) -> Slots:
    assert hf_engine._slots is not None
    return hf_engine._slots


def by_completion(parts):
    """(index, member) -> its tokens, their log-probabilities, whether it was truncated."""
    completions = {}
    for part in parts:
        for member, ids, mask, logprobs, cut in zip(
            part.members, part.token_ids, part.loss_mask.bool(), part.logprobs, part.truncated, strict=True
        ):
            completions[part.index, member] = ids[mask], logprobs[mask], bool(cut)
    return completions


def assert_same_tokens(actual, expected):
    assert actual.keys() == expected.keys()
    for key, (ids, logprobs, cut) in expected.items():
        assert actual[key][0].tolist() == ids.tolist() and actual[key][2] == cut, key
        torch.testing.assert_close(actual[key][1], logprobs, rtol=0, atol=LOGPROB_BOUND)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_it_conforms(check, model):
    check(partial(HuggingFaceEngine, model, CPU, refill=True), model)


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"stop": ("8=", "31")}], ids=str
)
def test_the_tokens_are_those_of_whole_batches(model, changes):
    settings = replace(LONG, **changes)
    expected = by_completion(sample(engine(model, refill=False), prompts_of(MIXED), settings))
    actual = by_completion(sample(engine(model, max_batch_sequences=13), prompts_of(MIXED), settings))
    assert_same_tokens(actual, expected)


@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_prompts_of_one_length_need_no_width(model, max_rows):
    prompts = prompts_of([8] * 3)
    expected = by_completion(sample(engine(model, width=None, refill=False), prompts, LONG))
    hf_engine = engine(model, width=None, max_batch_sequences=max_rows)
    assert_same_tokens(by_completion(sample(hf_engine, prompts, LONG)), expected)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma"])
def test_other_architectures(name, tmp_path):
    model, prompts = tiny_architecture(name, tmp_path), prompts_of(MIXED[:6])
    expected = by_completion(sample(engine(model, refill=False), prompts, LONG))
    assert_same_tokens(by_completion(sample(engine(model, max_batch_sequences=6), prompts, LONG)), expected)


@pytest.mark.parametrize("heads", [(4, 2, 8), (6, 1, 64), (8, 2, 64)], ids=str)
def test_numbers_do_not_depend_on_who_runs_beside(tmp_path, heads):
    """Long enough for the sizes at which matrix products of several heads change their way."""
    num_heads, num_kv_heads, size = heads
    model = tiny_architecture(
        "llama",
        tmp_path,
        hidden_size=num_heads * size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=size,
        max_position_embeddings=512,
    )
    settings = replace(LONG, group_size=2)
    repeats = (1, 50, 72)
    prompts = [replace(one, token_ids=one.token_ids.repeat(repeats[one.index])) for one in prompts_of([8, 3, 5])]
    expected = None
    for max_rows in (1, 4, 6):
        actual = by_completion(sample(engine(model, width=400, max_batch_sequences=max_rows), prompts, settings))
        expected = expected or actual
        for key, (ids, logprobs, _) in expected.items():
            assert_bitwise_equal(actual[key][0], ids)
            assert_bitwise_equal(actual[key][1], logprobs)


def test_equal_prompts_that_begin_together_are_computed_once(model, monkeypatch):
    computed, prefill = [], Slots._prefill_some

    def counted(self, sequences, width):
        computed.extend(sequences)
        return prefill(self, sequences, width)

    monkeypatch.setattr(Slots, "_prefill_some", counted)
    prompt, settings = prompts_of([5])[0], replace(LONG, group_size=1)
    prompts = [replace(prompt, index=index) for index in range(4)]
    together = by_completion(sample(engine(model, max_batch_sequences=8), prompts, settings))
    assert len(computed) == 1
    apart = by_completion(sample(engine(model, max_batch_sequences=1), prompts, settings))
    assert len(computed) == 1 + len(prompts) and together.keys() == apart.keys()
    for key, (ids, logprobs, _) in apart.items():
        assert_bitwise_equal(together[key][0], ids)
        assert_bitwise_equal(together[key][1], logprobs)
    assert len({tuple(ids.tolist()) for ids, _, _ in apart.values()}) == len(prompts), "each has noise of its own"


def test_a_row_that_has_ended_goes_to_the_next_completion(model, monkeypatch):
    running, step = [], Slots._step
    monkeypatch.setattr(Slots, "_step", lambda self: running.append(self.num_running) or step(self))
    parts = sample(engine(model, max_batch_sequences=8), prompts_of([4] * 10), LONG)
    tokens = [int(part.loss_mask.sum()) for part in parts]
    assert len(parts) == 40, "each comes back by itself"
    assert len(running) < 1.3 * sum(tokens) / 8 + max(tokens), "rows stood empty while completions waited"
    drained = running.index(next(n for n in running if n < 8))
    assert all(n < 8 for n in running[drained:]) and len(running) - drained <= max(tokens)


def test_it_takes_the_next_prompt_while_a_group_is_under_way(model):
    hf_engine, settings = engine(model, max_batch_sequences=6), replace(LONG, max_new_tokens=60)
    assert hf_engine.free_capacity(4) == 2, "a part of a group may begin"
    hf_engine.submit(prompts_of([4, 4]), settings, seed=1, step=0)
    assert hf_engine.free_capacity(4) == 0
    back = []
    while hf_engine.free_capacity(4) == 0:
        back += hf_engine.finished()
    assert len(back) == 3 and slots_of(hf_engine).num_running > 0, (
        "eight completions in six rows: room when three are back"
    )
    hf_engine.submit(prompts_of([4], first=2), settings, seed=1, step=0)
    while parts := hf_engine.finished():
        back += parts
    assert_same_tokens(
        by_completion(back),
        by_completion(
            sample(engine(model, refill=False), prompts_of([4, 4, 4])[:2] + prompts_of([4], first=2), settings)
        ),
    )
    assert hf_engine.free_capacity(4) == 2


def test_completions_under_way_are_all_sampled_alike(model):
    hf_engine = engine(model)
    hf_engine.submit(prompts_of([4]), LONG, seed=1, step=0)
    with pytest.raises(ValueError, match="not with SamplingSettings"):
        hf_engine.submit(prompts_of([4], first=1), replace(LONG, temperature=0.5), seed=1, step=0)


def test_other_lengths_have_a_cache_of_their_own(model):
    hf_engine = engine(model)
    for num_tokens in (40, 39, 7):
        settings = replace(LONG, max_new_tokens=num_tokens)
        expected = by_completion(sample(engine(model, refill=False), prompts_of(MIXED[:2]), settings))
        assert_same_tokens(by_completion(sample(hf_engine, prompts_of(MIXED[:2]), settings)), expected)


def test_memory_bounds_the_rows(model, monkeypatch):
    """2 layers, keys and values, 2 heads of 8 numbers of 4 bytes; 8 + 40 columns."""
    row_bytes = 2 * 2 * 2 * 8 * 4 * 48
    monkeypatch.setattr(slots, "free_bytes", lambda device: 70 * row_bytes)
    running, step = [], Slots._step
    monkeypatch.setattr(Slots, "_step", lambda self: running.append(self.num_running) or step(self))
    hf_engine = engine(model, cache_share=0.15)
    parts = by_completion(sample(hf_engine, prompts_of(MIXED), LONG))
    assert max(running) == 10
    assert_same_tokens(parts, by_completion(sample(engine(model, refill=False), prompts_of(MIXED), LONG)))
    cache = slots_of(hf_engine)._cache
    assert cache is not None and sum(t.nbytes for t in (*cache.keys, *cache.values)) == 10 * row_bytes
    monkeypatch.setattr(slots, "free_bytes", lambda device: row_bytes)
    with pytest.raises(
        WorkersError, match=r"one completion of 48 tokens.* needs 0.00 GB, which does not fit in 0.25 of the 0.00 GB"
    ):
        engine(model).submit(prompts_of([3]), LONG, seed=1, step=0)


@pytest.mark.parametrize(("num_groups", "free_rows"), [(2, None), (5, None), (12, None), (12, 80), (12, 20)])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_the_cache_is_what_a_plan_counts(kind, num_groups, free_rows, tmp_path, monkeypatch):
    model = tiny_architecture(kind, tmp_path)
    shape = ModelShape.from_folder(model.folder)
    lengths = Lengths(mean_tokens=40, limit_tokens=40, prompt_tokens=8, group_size=4)
    job = JobShape(lengths=lengths, num_groups=num_groups, on_gpu=False, engine_options={"refill": True})
    tried = engine(model)
    if free_rows is not None:
        config = tried._model.config
        numbers = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        free = free_rows * 2 * numbers * 4 * 48
        monkeypatch.setattr(slots, "free_bytes", lambda device: free)
        job = replace(job, host_bytes=free + sum(tensor.nbytes for tensor in tried.weights().values()))
    sample(tried, prompts_of(MIXED[:num_groups]), LONG)
    cache = slots_of(tried)._cache
    assert cache is not None
    assert SPEC.memory(shape, job).kv_pool == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))


def test_a_cache_that_grows_keeps_who_runs(model):
    expected = by_completion(sample(engine(model, refill=False), prompts_of(MIXED), LONG))
    hf_engine = engine(model)
    prompts = prompts_of(MIXED)
    hf_engine.submit(prompts[:1], LONG, seed=1, step=0)
    parts = hf_engine.finished()
    assert slots_of(hf_engine).num_running > 0
    hf_engine.submit(prompts[1:], LONG, seed=1, step=0)
    while finished := hf_engine.finished():
        parts += finished
    assert_same_tokens(by_completion(parts), expected)


def test_rows_that_run_wait_through_an_offload(model):
    expected = by_completion(sample(engine(model, refill=False), prompts_of(MIXED[:2]), LONG))
    hf_engine = engine(model, max_batch_sequences=5)
    hf_engine.submit(prompts_of(MIXED[:2]), LONG, seed=1, step=0)
    back = hf_engine.finished()
    hf_engine.offload()
    hf_engine.onload()
    assert slots_of(hf_engine).num_running > 0
    while parts := hf_engine.finished():
        back += parts
    assert_same_tokens(by_completion(back), expected)
    hf_engine.offload()
    assert slots_of(hf_engine)._cache is None, "the cache stays though nobody runs"


def test_a_completion_has_the_version_that_began_it(model):
    hf_engine = engine(model, max_batch_sequences=6)
    hf_engine.weights_received(3)
    hf_engine.submit(prompts_of([4, 4]), LONG, seed=1, step=0)
    first = hf_engine.finished()
    hf_engine.weights_received(4)
    later = []
    while parts := hf_engine.finished():
        later += parts
    assert {part.policy_version for part in first} == {3}
    assert {part.policy_version for part in later} == {3, 4}


def test_a_model_that_cannot_be_refilled_is_named(tmp_path):
    with pytest.raises(ValueError, match="refill=true: rows cannot be refilled, because its attention is 'eager'"):
        engine(tiny_architecture("gemma2", tmp_path))


def test_a_share_is_a_share(model):
    with pytest.raises(ValueError, match=r"cache_share=1\.5: use a share above 0"):
        engine(model, cache_share=1.5)

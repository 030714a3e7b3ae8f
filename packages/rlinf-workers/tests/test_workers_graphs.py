"""Decoding with a cache of fixed size, without a GPU: the numbers are those of a cache that grows, and graphs are
captured, kept and given up when they should be (a stand-in runs the step again where a graph is replayed)."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Lfm2Config, Qwen2Config, Qwen3MoeConfig

from rlinf_workers.engines.huggingface import graphs
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.huggingface.graphs import FixedDecoder, NotCapturableError, bucket, why_not
from rlinf_workers.engines.sampling import SamplingSettings, sample_by_blocks, sample_tokens
from rlinf_workers.models.language_model import build_model
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.engines import ENGINE_CHECKS, prompts_of, sample

CPU = torch.device("cpu")
MIXED = [3, 8, 5, 7, 8, 2, 4, 6, 8, 1, 5, 3]
LONG = SamplingSettings(group_size=4, max_new_tokens=40)


class Fixed(HuggingFaceEngine):
    """Decodes as on a GPU, without graphs, or with stand-ins for them."""

    def __init__(self, *arguments, captures=False, **options):
        super().__init__(*arguments, **options)
        self._decoder = self._make_decoder(captures=captures)


class Replayed:
    """Stands for a graph."""

    def __init__(self, run):
        self.replay = run

    def reset(self):
        pass


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(graphs, "FEWEST_KEYS", 16)


@pytest.fixture
def captured(monkeypatch):
    """The steps that were captured."""
    steps = []

    def capture(decoder, step):
        steps.append((step.num_rows, step.num_keys))
        return Replayed(partial(decoder._run, step))

    monkeypatch.setattr(FixedDecoder, "_capture", capture)
    return steps


def decoder_of(engine) -> FixedDecoder:
    return engine._decoder


def of_kind(kind, model, *, width=8, **options):
    return kind(model, CPU, max_prompt_tokens=width, **options)


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.index == other.index
        assert torch.equal(one.loss_mask, other.loss_mask)
        assert torch.equal(one.token_ids * one.loss_mask, other.token_ids * other.loss_mask)
        assert torch.equal(one.truncated, other.truncated)
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


def both(model, prompts, settings=LONG, **options):
    """What the engine makes with a cache that grows, and what with one of fixed size."""
    return [sample(of_kind(kind, model, **options), prompts, settings) for kind in (HuggingFaceEngine, Fixed)]


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_it_conforms(check, model):
    check(partial(Fixed, model, CPU), model)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize(("width", "lengths"), [(8, MIXED), (None, [8] * 5)], ids=["mixed", "one length"])
def test_the_numbers_are_those_of_a_cache_that_grows(model, width, lengths, changes):
    expected, actual = both(model, prompts_of(lengths), replace(LONG, **changes), width=width)
    assert_same(actual, expected)
    if changes.get("temperature") != 0:
        ends = torch.cat([part.loss_mask.sum(1) for part in expected])
        assert len(ends.unique()) > 5 and ends.max() == 40, "rows that end together, or none late, prove little"


@pytest.mark.parametrize(("captures", "num_tokens"), [(False, 70), (True, 27)], ids=["step by step", "captured"])
def test_stop_strings_end_rows_between_two_looks_and_rows_that_were_moved(model, captured, captures, num_tokens):
    settings = replace(LONG, max_new_tokens=num_tokens, stop=("8=", "0", "31"))
    expected = sample(of_kind(HuggingFaceEngine, model), prompts_of(MIXED), settings)
    lengths = torch.cat([part.loss_mask.sum(1) for part in expected])
    assert len(lengths.unique()) > 10 and lengths.max() > graphs.CHECK_EVERY
    engine = of_kind(Fixed, model, captures=captures)
    assert_same(sample(engine, prompts_of(MIXED), settings), expected)
    decoder = decoder_of(engine)
    assert not captures or {step.sampling.stop for step in decoder._graphs} == {()}, "a graph for each stop string"


def test_prompts_are_prefilled_and_drawn_a_few_at_a_time(model, monkeypatch):
    monkeypatch.setattr(graphs, "PREFILL_TOKENS", 3 * 8)
    monkeypatch.setattr(graphs, "FIRST_DRAWS", 8)
    sizes, forward = [], HuggingFaceEngine._forward
    monkeypatch.setattr(
        HuggingFaceEngine, "_forward", lambda self, ids, *rest: sizes.append(len(ids)) or forward(self, ids, *rest)
    )
    completions = sample(of_kind(Fixed, model), prompts_of(MIXED[:10]), LONG)
    assert sizes == [3, 3, 3, 1]
    monkeypatch.undo()
    assert_same(completions, sample(of_kind(HuggingFaceEngine, model), prompts_of(MIXED[:10]), LONG))


def test_a_batch_leaves_nothing_behind_for_the_next(model):
    """Larger and smaller batches, longer and shorter completions, in buffers that are kept."""
    grown, fixed = of_kind(HuggingFaceEngine, model), of_kind(Fixed, model)
    for step, (lengths, num_tokens) in enumerate([(MIXED, 40), ([8], 9), ([1, 2, 3], 40), (MIXED + MIXED, 50)]):
        settings = replace(LONG, max_new_tokens=num_tokens)
        expected, actual = (sample(one, prompts_of(lengths), settings, step=step) for one in (grown, fixed))
        assert_same(actual, expected)


def test_the_host_asks_rarely_whether_all_have_ended(model, monkeypatch):
    engine, steps, run = of_kind(Fixed, model), [], FixedDecoder._run
    monkeypatch.setattr(FixedDecoder, "_run", lambda self, step: steps.append(step) or run(self, step))
    short = sample(engine, prompts_of([3]), replace(LONG, group_size=1, max_new_tokens=200))
    ended = int(short[0].loss_mask.sum())
    assert ended < 200 and len(steps) == -(-ended // graphs.CHECK_EVERY) * graphs.CHECK_EVERY - 1


def test_a_graph_is_captured_for_each_number_of_rows_and_keys_and_kept(model, captured):
    engine, settings = of_kind(Fixed, model, captures=True), replace(LONG, temperature=0.9)
    expected = sample(of_kind(HuggingFaceEngine, model), prompts_of(MIXED), settings)
    assert_same(sample(engine, prompts_of(MIXED), settings), expected)
    first = list(captured)
    assert first[:2] == [(48, 16), (48, 24)] and first[-1][1] == 48 and decoder_of(engine).num_graphs == len(first) > 3
    assert_same(sample(engine, prompts_of(MIXED), settings), expected)
    assert captured == first, "captured again"
    sample(engine, prompts_of([3]), replace(settings, group_size=1))
    assert captured[len(first)] == (8, 16)


def test_rows_that_run_go_on_alone(model, monkeypatch):
    sizes, run = [], FixedDecoder._run
    monkeypatch.setattr(FixedDecoder, "_run", lambda self, step: sizes.append(step.num_rows) or run(self, step))
    settings = replace(LONG, max_new_tokens=80)
    expected, actual = both(model, prompts_of(MIXED), settings)
    assert_same(actual, expected)
    lengths = torch.cat([part.loss_mask.sum(1) for part in expected])
    assert sizes[0] == 48 and len(set(sizes)) > 2
    for t, size in enumerate(sizes, 1):
        begun = t // graphs.CHECK_EVERY * graphs.CHECK_EVERY
        running = int((lengths > begun).sum())
        assert running <= size and (size == 48 or size // 2 < bucket(running, 8))


@pytest.mark.parametrize("leaves", ["offload", "discard"])
def test_weights_that_move_are_captured_again(model, captured, leaves, monkeypatch):
    engine = of_kind(Fixed, model, captures=True)
    expected = sample(engine, prompts_of(MIXED[:2]))
    monkeypatch.setattr(type(engine._moved), "is_on", lambda self, device: True)  # on a CPU nothing moves
    getattr(engine, leaves)()
    assert decoder_of(engine).num_graphs == 0 and decoder_of(engine)._buffers is None
    engine.onload()
    assert_same(sample(engine, prompts_of(MIXED[:2])), expected)
    assert captured == [(8, 16)] * 2


def test_weights_in_another_place_are_captured_again_though_nobody_said_so(model, captured):
    engine = of_kind(Fixed, model, captures=True)
    sample(engine, prompts_of(MIXED[:2]))
    sample(engine, prompts_of(MIXED[:2]))
    assert captured == [(8, 16)]
    weight = engine._model.lm_head.weight
    weight.data = weight.data.clone()
    sample(engine, prompts_of(MIXED[:2]))
    assert captured == [(8, 16)] * 2


class AsksTheHost(torch.nn.Module):
    def __init__(self, inner, ask):
        super().__init__()
        self.inner, self.ask = inner, ask

    def forward(self, hidden):
        self.ask(hidden)
        return self.inner(hidden)


@pytest.mark.parametrize(
    "ask",
    [
        lambda hidden: float(hidden.sum()),
        lambda hidden: hidden.nonzero(),
        lambda hidden: hidden[hidden > 0],
        lambda hidden: bool((hidden > 0).any()),
    ],
    ids=["item", "nonzero", "mask", "bool"],
)
def test_a_model_that_waits_for_the_host_is_said_and_not_captured(model, captured, caplog, ask):
    engine = of_kind(Fixed, model, captures=True)
    layer = engine._model.model.layers[0]
    layer.mlp = AsksTheHost(layer.mlp, ask)
    assert_same(
        sample(engine, prompts_of(MIXED), LONG), sample(of_kind(HuggingFaceEngine, model), prompts_of(MIXED), LONG)
    )
    assert captured == []
    assert caplog.text.count("decoding without CUDA graphs, because a step of the model synchronizes") == 1


def test_a_step_that_torch_does_not_capture_is_said_and_taken_once(model, monkeypatch, caplog):
    def capture(decoder, step):
        raise NotCapturableError("torch refused a step of the model: a copy")

    monkeypatch.setattr(FixedDecoder, "_capture", capture)
    engine = of_kind(Fixed, model, captures=True)
    assert_same(
        sample(engine, prompts_of(MIXED), LONG), sample(of_kind(HuggingFaceEngine, model), prompts_of(MIXED), LONG)
    )
    assert caplog.text.count("decoding without CUDA graphs, because torch refused") == 1


@pytest.mark.parametrize(("name", "num_norms"), [("qwen2", 5), ("qwen3", 9), ("llama", 5), ("gemma", 0)])
def test_norms_are_computed_in_one_kernel_where_that_is_the_same(name, num_norms, tmp_path):
    """Gemma adds 1 to the weights."""
    tiny = tiny_architecture(name, tmp_path)
    engine = of_kind(Fixed, tiny)
    assert len(decoder_of(engine)._norms) == num_norms
    assert_same(
        sample(engine, prompts_of(MIXED), LONG), sample(of_kind(HuggingFaceEngine, tiny), prompts_of(MIXED), LONG)
    )
    assert all("forward" not in vars(norm) for norm in decoder_of(engine)._norms), "prompts are prefilled as they were"


def test_a_norm_that_only_looks_plain_is_left_alone():
    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, hidden_states):
            return hidden_states * (1 + self.weight)

    assert not graphs._is_plain_norm(Shifted()) and not graphs._is_plain_norm(torch.nn.LayerNorm(8))


def test_a_copy_to_the_host_is_found():
    there = torch.zeros(3, device="meta")
    with graphs._WithoutTheHost(), pytest.raises(NotCapturableError, match="copy"):
        there.to("cpu")


TINY: dict[str, Any] = {
    "vocab_size": 15,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen2Config(**TINY, num_key_value_heads=2), None),
        (Qwen3MoeConfig(**TINY, num_key_value_heads=2), None),
        (Qwen2Config(**TINY, num_key_value_heads=2, **SLIDING), None),
        (Lfm2Config(**TINY, layer_types=["conv", "full_attention"]), "layers of other kinds"),
        (Gemma2Config(**TINY, num_key_value_heads=2), "its "),  # its attention or its layers, by the release
    ],
    ids=["qwen2", "qwen3 moe", "sliding window", "convolutions", "gemma2"],
)
def test_which_models_it_is_for(config, reason):
    from transformers import AutoModelForCausalLM

    actual = why_not(AutoModelForCausalLM.from_config(config))
    assert (actual is None) == (reason is None) and (reason or "") in (actual or "")


@pytest.mark.parametrize(
    ("size", "least", "expected"), [(1, 8, 8), (9, 8, 12), (13, 8, 16), (512, 8, 512), (129, 64, 192), (193, 64, 256)]
)
def test_sizes_are_rounded_up(size, least, expected):
    assert bucket(size, least) == expected


@pytest.mark.parametrize("vocabulary", [15, 128, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_draw_by_blocks_is_the_plain_draw(vocabulary, temperature):
    settings = SamplingSettings(group_size=1, max_new_tokens=1, temperature=temperature)
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(4000, vocabulary, generator=generator) * 3
    logits[:, vocabulary // 2] = -torch.inf
    uniform = torch.rand(4000, generator=generator)
    uniform[:8] = torch.tensor([0.0, 1 - 2**-24]).repeat(4)
    tokens, logprobs = sample_by_blocks(logits, uniform, settings)
    expected, _ = sample_tokens(logits.double(), uniform.double(), settings)
    assert (tokens != expected).sum() <= 4, "only where a number lies on a border"
    assert tokens.max() < vocabulary and (tokens != vocabulary // 2).all()
    every = (logits / temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs, every.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)


def test_a_gpu_is_asked_for_by_default_and_a_cpu_has_none(model):
    assert HuggingFaceEngine(model, CPU, max_prompt_tokens=8)._decoder is None
    assert build_model(model, CPU).config._attn_implementation == "sdpa"

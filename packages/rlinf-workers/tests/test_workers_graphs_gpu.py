"""What only a GPU can show of captured decoding: a replayed step computes what the step computes."""

from dataclasses import replace

import pytest
import torch

from rlinf_workers.engines.huggingface import graphs
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.engines import prompts_of, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda:0")
MIXED = [3, 8, 5, 7, 8, 2, 4, 6, 8, 1, 5, 3]
LONG = SamplingSettings(group_size=4, max_new_tokens=40)
CASES = [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(graphs, "FEWEST_KEYS", 16)


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def tiny(request, tmp_path_factory):
    return tiny_architecture(request.param, tmp_path_factory.mktemp("tiny"))


def engine(model, *, width=8, **options):
    hf_engine = HuggingFaceEngine(model, DEVICE, max_prompt_tokens=width, **options)
    hf_engine.onload()
    return hf_engine


def decoder_of(engine) -> graphs.FixedDecoder:
    return engine._decoder


def assert_same(actual, expected, bound=1e-4):
    """Tokens, and log-probabilities in nats; in float32."""
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.loss_mask, other.loss_mask)
        assert torch.equal(one.token_ids * one.loss_mask, other.token_ids * other.loss_mask)
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=bound)


@pytest.mark.parametrize("changes", CASES, ids=str)
@pytest.mark.parametrize(("width", "lengths"), [(8, MIXED), (None, [8] * 5)], ids=["mixed", "one length"])
def test_the_numbers_are_those_of_eager_decoding(tiny, width, lengths, changes):
    settings = replace(LONG, **changes)
    expected = sample(engine(tiny, width=width, cuda_graphs=False), prompts_of(lengths), settings)
    captured = engine(tiny, width=width)
    first, again = (sample(captured, prompts_of(lengths), settings) for _ in range(2))
    assert_same(first, expected)
    assert_same(again, first, bound=0.0)


def test_log_probabilities_are_those_of_one_forward(tiny):
    hf_engine = engine(tiny)
    prompts = prompts_of(MIXED)
    for part in sample(hf_engine, prompts, LONG):
        prompt = prompts[part.index].token_ids.to(DEVICE)
        for row, mask, logprobs in zip(part.token_ids, part.loss_mask.bool(), part.logprobs, strict=True):
            tokens = row[mask].to(DEVICE)
            with torch.no_grad():
                logits = hf_engine._model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu()
            torch.testing.assert_close(logprobs[mask], expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return tiny_architecture("qwen2", tmp_path_factory.mktemp("qwen2"))


def test_weights_that_are_filled_in_place_are_served_by_the_same_graphs(qwen2):
    captured, plain = engine(qwen2), engine(qwen2, cuda_graphs=False)
    sample(captured, prompts_of(MIXED), LONG)
    graphs_before = dict(decoder_of(captured)._graphs)
    assert graphs_before, "nothing was captured"
    for one in (captured, plain):
        generator = torch.Generator().manual_seed(5)
        for tensor in one.weights().values():
            with torch.no_grad():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    assert_same(sample(captured, prompts_of(MIXED), LONG), sample(plain, prompts_of(MIXED), LONG))
    graphs = decoder_of(captured)._graphs  # other weights sample other lengths, whose sizes may be captured beside them
    assert all(graphs[step] is graph for step, graph in graphs_before.items())


def test_offloading_gives_the_memory_back_and_graphs_are_captured_again(qwen2):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)
    hf_engine = engine(qwen2, max_batch_sequences=4096)
    many = prompts_of(MIXED * 60)
    expected = sample(hf_engine, many, LONG)
    num_graphs, held = decoder_of(hf_engine).num_graphs, torch.cuda.memory_reserved(DEVICE) - before
    hf_engine.offload()
    torch.cuda.empty_cache()  # as the worker does
    assert decoder_of(hf_engine).num_graphs == 0 and num_graphs > 2
    assert torch.cuda.memory_reserved(DEVICE) - before <= max(held // 4, 48 * 2**20), "32 MB are cuBLAS's own"
    hf_engine.onload()
    assert_same(sample(hf_engine, many, LONG), expected, bound=0.0)
    assert decoder_of(hf_engine).num_graphs == num_graphs


def test_weights_that_arrive_after_a_discard_are_served(qwen2):
    hf_engine = engine(qwen2)
    expected = sample(hf_engine, prompts_of(MIXED), LONG)
    weights = {name: tensor.detach().cpu() for name, tensor in hf_engine.weights().items()}
    hf_engine.discard()
    hf_engine.onload()
    with torch.no_grad():
        for name, tensor in hf_engine.weights().items():
            tensor.copy_(weights[name])
    assert_same(sample(hf_engine, prompts_of(MIXED), LONG), expected, bound=0.0)


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_a_model_that_waits_for_the_host_is_decoded_without_graphs(tmp_path, caplog, experts):
    """A loop over experts waits, and so does `grouped_mm` in float32, inside of its kernel."""
    hf_engine = engine(tiny_architecture("qwen3_moe", tmp_path))
    hf_engine._model.config._experts_implementation = experts
    expected = sample(engine(tiny_architecture("qwen3_moe", tmp_path), cuda_graphs=False), prompts_of(MIXED), LONG)
    assert_same(sample(hf_engine, prompts_of(MIXED), LONG), expected)
    assert decoder_of(hf_engine).num_graphs == 0
    assert caplog.text.count("decoding without CUDA graphs, because") == 1


def test_experts_in_bfloat16_are_captured(tmp_path):
    model = replace(tiny_architecture("qwen3_moe", tmp_path), dtype="bfloat16")
    captured, plain = engine(model), engine(model, cuda_graphs=False)
    greedy = replace(LONG, group_size=1, max_new_tokens=2)
    for one, other in zip(*(sample(kind, prompts_of(MIXED), greedy) for kind in (captured, plain)), strict=True):
        torch.testing.assert_close(one.logprobs[:, 0], other.logprobs[:, 0], rtol=0, atol=0.1)
    assert decoder_of(captured).num_graphs == 1

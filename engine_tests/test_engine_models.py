"""Greedy tokens of the engine `sglang` against transformers, for each architecture and cut over two processes."""

import pytest
import torch

from rlinf_workers.engines import SamplingSettings
from rlinf_workers.engines.sglang.engine import SGLangEngine
from rlinf_workers.models.language_model import build_model
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.engines import prompts_of, sample

GREEDY = SamplingSettings(group_size=1, max_new_tokens=16, temperature=0.0)
LOGPROB_BOUND = 1e-5


@pytest.mark.parametrize(("architecture", "num_devices"), [("qwen2", 1), ("qwen3", 1), ("qwen3_moe", 1), ("qwen2", 2)])
def test_greedy_tokens_and_their_log_probabilities_are_those_of_transformers(architecture, num_devices, tmp_path):
    model = tiny_architecture(architecture, tmp_path)
    reference = build_model(model, torch.device("cpu"))
    devices = [f"cpu:{i}" for i in range(num_devices)]
    engine = SGLangEngine(model, torch.device("cpu"), max_prompt_tokens=8, devices=devices)
    try:
        compare_greedy(engine, reference)
    finally:
        engine.close()


def compare_greedy(engine, reference):
    prompts = prompts_of([3, 8, 5, 1, 2, 7, 4, 6])
    for part in sample(engine, prompts, GREEDY):
        prompt = prompts[part.index].token_ids
        sequence = reference.generate(
            prompt[None], attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=16
        )[0]
        tokens = part.token_ids[0][part.loss_mask[0].bool()]
        assert tokens.tolist() == sequence[len(prompt) :].tolist()
        with torch.no_grad():
            scores = reference(sequence[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = scores.gather(-1, tokens[:, None])[:, 0]
        assert (part.logprobs[0, : len(tokens)] - expected).abs().max() <= LOGPROB_BOUND

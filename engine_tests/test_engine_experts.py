"""Router replay with the engine `sglang`: the experts that it returns are those that its tokens went to."""

import copy

import pytest
import torch

from rlinf_workers.engines import SamplingSettings
from rlinf_workers.engines.sglang.engine import SGLangEngine
from rlinf_workers.models.language_model import build_model
from rlinf_workers.models.router_replay import replayed_experts
from rlinf_workers.models.routers import routers_of
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.engines import prompts_of, sample

LOGPROB_BOUND = 1e-5
PROMPTS = prompts_of([3, 8, 5, 1, 2, 7, 4, 6] * 4)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return tiny_architecture("qwen3_moe", tmp_path_factory.mktemp("model"), num_experts=16, num_experts_per_tok=4)


def sampling(group_size):
    return SamplingSettings(group_size=group_size, max_new_tokens=16, records_experts=True)


def logprobs_of(model, tokens, num_prompt_tokens):
    with torch.no_grad():
        scores = model(tokens[None]).logits[0, num_prompt_tokens - 1 : -1].log_softmax(-1)
    return scores.gather(-1, tokens[num_prompt_tokens:, None])[:, 0]


def compare(parts, model):
    """Of all choices the share that the model makes, too, and the largest distance of a log-probability from the
    engine's: with the experts of the engine, and with the model's own."""
    shares, replayed, own = [], 0.0, 0.0
    for part in parts:
        prompt = PROMPTS[part.index].token_ids
        for row, mask in enumerate(part.loss_mask.bool()):
            num_tokens = int(mask.sum())
            tokens = torch.cat([prompt, part.token_ids[row][mask]])
            experts = torch.cat([part.prompt_experts, part.experts[row, : num_tokens - 1]])
            assert not part.experts[row, num_tokens - 1 :].any(), "after the end"
            with replayed_experts(model, torch.cat([experts, experts[-1:]])) as choices:  # the last has none
                logprobs = logprobs_of(model, tokens, len(prompt))
            own_choices = torch.stack([call for (call,) in choices], 1)[:-1]
            shares.append((experts[..., None] == own_choices[..., None, :]).any(-1).float().mean())
            replayed = max(replayed, float((logprobs - part.logprobs[row][mask]).abs().max()))
            own = max(own, float((logprobs_of(model, tokens, len(prompt)) - part.logprobs[row][mask]).abs().max()))
    return float(torch.stack(shares).mean()), replayed, own


def test_the_trainer_computes_with_the_experts_of_the_engine(settings):
    """Prompts that are computed once for four completions, and such that have one. With other routers in the trainer,
    log-probabilities stay close only with the experts of the engine."""
    model = build_model(settings, torch.device("cpu"))
    engine = SGLangEngine(settings, torch.device("cpu"), max_prompt_tokens=8, enable_return_routed_experts=True)
    try:
        parts = [part for group_size in (4, 1) for part in sample(engine, PROMPTS, sampling(group_size))]
    finally:
        engine.close()
    assert sum(len(part.members) for part in parts) == 5 * len(PROMPTS)
    for part in parts:
        assert part.prompt_experts is not None and part.experts is not None
        assert part.prompt_experts.shape == (len(PROMPTS[part.index].token_ids), 2, 4)
        assert part.prompt_experts.dtype == part.experts.dtype == torch.uint8
    share, replayed, own = compare(parts, model)
    assert share == 1.0
    assert max(replayed, own) <= LOGPROB_BOUND

    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for router in routers_of(other):
            for parameter in router.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    share, replayed, own = compare(parts, other)
    print(f"with noise on the routers: {share:.3%} of the choices agree; gap {replayed:.1e} nats, without {own:.1e}")
    assert share < 1.0
    assert replayed < own / 4


def test_without_the_server_argument_no_experts_are_promised():
    engine = SGLangEngine.__new__(SGLangEngine)
    engine._lost, engine._has_weights, engine._expert_rows = None, True, None
    with pytest.raises(ValueError, match="enable_return_routed_experts is not true"):
        engine.submit(PROMPTS[:1], sampling(1), seed=0, step=0)

"""Router replay: the engine's experts are recorded for each token, and the trainer computes with them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlinf_algos import preset
from rlinf_workers.collectives import RankGroup
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.metrics import merge
from rlinf_workers.models.language_model import load_model
from rlinf_workers.models.packed import PackedBatch, own_part, pack_without_padding
from rlinf_workers.models.router_replay import recorded_experts, replayed_experts
from rlinf_workers.models.sequence_parallel import shared_rows
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles.language.actor import Actor, ActorSettings
from rlinf_workers.roles.language.rollout import OpenGroups
from rlinf_workers.roles.records.language import Prompt, ScoredGroup
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings

CPU, GROUP_SIZE, NUM_TOKENS, LAYERS, EXPERTS, TOP_K = torch.device("cpu"), 4, 12, 2, 8, 2
SAMPLING = SamplingSettings(group_size=GROUP_SIZE, max_new_tokens=NUM_TOKENS, records_experts=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return tiny_architecture("qwen3_moe", tmp_path_factory.mktemp("experts"), num_experts=EXPERTS)


def random_prompts(*lengths):
    return [
        Prompt(
            index=index,
            token_ids=torch.randint(2, 13, (length,), generator=torch.Generator().manual_seed(index)),
            reference_answer="",
        )
        for index, length in enumerate(lengths)
    ]


def sampled(model, prompts, sampling=SAMPLING):
    """The groups of an engine, each prompt of at most 7 tokens."""
    engine = HuggingFaceEngine(model, CPU, max_prompt_tokens=7)
    engine.submit(prompts, sampling, seed=0, step=0)
    groups = OpenGroups(sampling.group_size)
    groups.open(prompts)
    return groups.add(engine.finished())


@pytest.fixture(scope="module")
def groups(experts):
    return sampled(load_model(experts), random_prompts(5, 3, 7))


@torch.no_grad()
def test_recorded_are_the_experts_of_each_token(experts, groups):
    model = load_model(experts).model
    assert len({int(n) for group in groups for n in group.extents}) > 3, "completions of several lengths"
    for group in groups:
        num_prompt, width = len(group.prompt.token_ids), int(group.extents.max()) - 1
        assert group.experts.dtype == torch.uint8 and group.experts.shape == (GROUP_SIZE, width, LAYERS, TOP_K)
        for ids, length, row in zip(group.completion_ids, group.extents.tolist(), group.experts, strict=True):
            sequence = torch.cat([group.prompt.token_ids, ids[: length - 1]])
            with recorded_experts(model) as by_router:
                model(input_ids=sequence[None], use_cache=False)
            expected = torch.stack([call for (call,) in by_router], 1)
            assert torch.equal(group.prompt_experts, expected[:num_prompt])
            assert torch.equal(row[: length - 1], expected[num_prompt:])
            assert not row[length - 1 :].any()


def test_they_are_not_recorded_unless_asked(experts):
    (group,) = sampled(load_model(experts), random_prompts(4), replace(SAMPLING, records_experts=False))
    assert group.experts is None and group.prompt_experts is None


def test_they_do_not_depend_on_the_batch(experts, groups):
    (alone,) = sampled(load_model(experts), random_prompts(5, 3, 7)[1:2])
    for name in ("completion_ids", "prompt_experts", "experts"):
        assert torch.equal(getattr(alone, name), getattr(groups[1], name)), name


def test_continuous_batching_records_the_same(experts, groups):
    model, waiting = load_model(experts), random_prompts(5, 3, 7)
    engine = HuggingFaceEngine(model, CPU, max_prompt_tokens=7, max_batch_sequences=6, refill=True)
    engine.submit(waiting[:1], replace(SAMPLING, records_experts=False), seed=0, step=0)
    while engine.free_capacity(GROUP_SIZE) < 2:  # a cache without experts is there before
        assert all(one.experts is None for one in engine.finished())
    open_groups, whole = OpenGroups(GROUP_SIZE), []
    while len(whole) < 3:
        while waiting and engine.free_capacity(GROUP_SIZE):
            open_groups.open(waiting[:1])
            engine.submit([waiting.pop(0)], SAMPLING, seed=0, step=0)
        whole += open_groups.add(engine.finished())
    for one, other in zip(sorted(whole, key=lambda group: group.index), groups, strict=True):
        assert torch.equal(one.prompt_experts, other.prompt_experts) and torch.equal(one.experts, other.experts)


def experts_of(batch: PackedBatch) -> torch.Tensor:
    assert batch.experts is not None
    return batch.experts


def test_a_subset_has_those_of_its_rows(groups):
    group, rows = groups[0], (slice(0, 2), slice(2, 4))
    whole, first, second = (experts_of(pack_without_padding([one])) for one in (group, *map(group.subset, rows)))
    assert torch.equal(whole, torch.cat([first, second[len(group.prompt.token_ids) :]]))


def test_the_digest_covers_them(groups):
    group = groups[0]
    changed = group.experts.clone()
    changed[0, 0, 0, 0] ^= 1
    assert replace(group, experts=changed).digest() != group.digest()
    assert replace(group, prompt_experts=group.prompt_experts ^ 1).digest() != group.digest()


def test_ranks_that_share_a_row_have_those_of_their_tokens(groups):
    whole = pack_without_padding(groups)
    parts = []
    for rank in range(2):
        with shared_rows(cast(RankGroup, SimpleNamespace(rank=rank, num_ranks=2))):
            part = own_part(whole)
        assert len(experts_of(part)) == len(part.token_ids)
        parts.append(experts_of(part))
    assert torch.equal(torch.cat(parts)[: len(whole.token_ids)], experts_of(whole))


def answers(experts, batch, *, replays=True, noise=0.0):
    """Log-probabilities and the agreement of a trainer whose routers are moved by noise."""
    kind = TokenModel(experts, 1.0, replays_routers=replays)
    model: Any = kind.build(CPU)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight += noise * torch.randn(weight.shape, generator=generator)
    return model, kind.answers(model, batch, entropies=False)


def gap(outputs, batch, groups):
    width = batch.loss_mask.shape[1]
    theirs = torch.cat([group.rollout_logprobs[:, :width] for group in groups])
    return ((outputs.logprobs.detach() - theirs).abs() * batch.loss_mask).max().item()


def test_equal_models_agree_up_to_rounding(experts, groups):
    batch = pack_without_padding(groups)
    _, outputs = answers(experts, batch)
    assert gap(outputs, batch, groups) < 1e-5 and outputs.router_agreement == 1


def test_other_routers_use_the_engines_experts(experts, groups):
    """Each router's weights are the trainer's own; only the choice is not. Without replay the choice differs."""
    batch = pack_without_padding(groups)
    model, outputs = answers(experts, batch, noise=0.02)
    _, without = answers(experts, batch, replays=False, noise=0.02)
    assert 0.8 < outputs.router_agreement < 1
    assert gap(outputs, batch, groups) < 0.1 * gap(without, batch, groups)
    outputs.logprobs.sum().backward()
    assert all(layer.mlp.gate.weight.grad.abs().max() > 0 for layer in model.model.layers)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
def test_any_experts_can_be_used(tmp_path, kind):
    """The weights of given experts are the router's probabilities, normalised as the architecture does."""
    sizes = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = load_model(tiny_architecture(kind, tmp_path, **sizes)).model
    router, hidden = model.model.layers[0].mlp.gate, torch.randn(3, 32)
    chosen = torch.tensor([[0, 3], [1, 2], [3, 0]], dtype=torch.uint8)
    with replayed_experts(model, chosen[:, None].repeat(1, LAYERS, 1)):
        logits, weights, indices = router(hidden)
    expected = logits.softmax(-1).gather(-1, chosen.long())
    if kind == "mixtral" or model.config.norm_topk_prob:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(indices, chosen.long())
    torch.testing.assert_close(weights, expected)
    assert torch.equal(router(hidden)[2], logits.topk(2).indices), "the router chooses again"


def test_choices_of_other_tokens_are_refused(experts, groups):
    batch = pack_without_padding(groups)
    with pytest.raises(RuntimeError, match=r"experts were recorded for \(\d+, 2\) choices of a router"):
        answers(experts, replace(batch, experts=experts_of(batch)[1:]))


def trained(make_worker, reader, experts, groups, *, noise=0.0, **backend):
    settings = ActorSettings(
        model=experts,
        algorithm=preset("grpo", group_size=GROUP_SIZE),
        optimizer=OptimizerSettings(learning_rate=1e-2, epsilon=1e-3, max_grad_norm=1e9),
        backend=BackendSettings(**backend),
        micro_batch_groups=1,
        max_tokens_per_micro_batch=40,
        router_replay=True,
        num_prompts=len(groups),
        max_completion_tokens=NUM_TOKENS,
        temperature=1.0,
    )
    actor = make_worker(Actor, settings, num_items=len(groups))
    with torch.no_grad():
        for name, weight in actor.weights().items():
            if name.endswith("mlp.gate.weight"):
                weight += noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    rewards = torch.arange(GROUP_SIZE) % 2.0
    scored = [ScoredGroup(samples=group, rewards=rewards, completions=("",) * GROUP_SIZE) for group in groups]
    actor.train(reader([scored]))
    return actor


@pytest.mark.parametrize("recompute", [False, True])
def test_backends_learn_the_same(make_worker, reader, experts, groups, recompute):
    """Layers that fsdp2 computes again in the backward pass use the engine's experts then, too."""
    plain, sharded = (
        trained(make_worker, reader, experts, groups, noise=0.1, **backend)
        for backend in ({}, {"name": "fsdp2", "options": {"recompute": recompute}})
    )
    for name, weight in plain.weights().items():
        torch.testing.assert_close(sharded.weights()[name].detach(), weight.detach(), rtol=1e-4, atol=1e-5)
    recorded = merge([plain._host.metrics.drain()])
    assert 0.5 < recorded["actor/router_agreement"] < 1


def test_groups_without_experts_are_refused(make_worker, reader, experts, groups):
    without = [replace(group, experts=None, prompt_experts=None) for group in groups]
    with pytest.raises(ValueError, match="the engine has not recorded the experts of prompt 0"):
        trained(make_worker, reader, experts, without)

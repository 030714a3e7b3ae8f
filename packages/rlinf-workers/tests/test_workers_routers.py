"""The load-balancing loss of a mixture of experts: that of transformers, padded or packed, and in the gradient."""

import dataclasses

import pytest
import torch

from rlinf_algos import preset
from rlinf_workers.metrics import merge
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.routers import has_balanced_routers, recorded_routers
from rlinf_workers.models.sequences import pack_groups
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles.language.actor import Actor, ActorSettings
from rlinf_workers.roles.records.language import Prompt, SampleGroup, ScoredGroup
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings

NUM_TOKENS, COEF = 5, 0.5


def group_of(index, prompt_length, lengths):
    generator = torch.Generator().manual_seed(index)
    mask = (torch.arange(NUM_TOKENS) < torch.tensor(lengths)[:, None]).float()
    samples = SampleGroup(
        prompt=Prompt(
            index=index, token_ids=torch.randint(2, 13, (prompt_length,), generator=generator), reference_answer=""
        ),
        completion_ids=torch.randint(2, 13, mask.shape, generator=generator) * mask.long(),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        policy_version=0,
    )
    rewards = torch.arange(len(mask)) % 2.0
    return ScoredGroup(samples=samples, rewards=rewards, completions=("",) * len(mask))


GROUPS = [group_of(0, 4, [5, 2]), group_of(1, 2, [1, 4]), group_of(2, 3, [3, 5])]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return tiny_architecture("qwen3_moe", tmp_path_factory.mktemp("experts"))


def test_it_is_that_of_transformers_for_one_sequence(experts):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    kind = TokenModel(experts, 1.0, balances_routers=True)
    model = kind.build(torch.device("cpu"))
    group = group_of(0, 4, [5]).samples
    ids = torch.cat([group.prompt.token_ids, group.completion_ids[0, :-1]])[None]
    logits = model(input_ids=ids, output_router_logits=True).router_logits
    expected = load_balancing_loss_func(tuple(logits), 4, 2)
    for batch in (pack_groups([group]), pack_without_padding([group])):
        router_loss = kind.answers(model, batch, entropies=False).router_loss
        torch.testing.assert_close(router_loss, expected, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            assert not kind.answers(model, batch, entropies=False).router_loss.numel(), "nobody learns from it"


def test_padding_is_no_token(experts):
    kind = TokenModel(experts, 1.0, balances_routers=True)
    model, samples = kind.build(torch.device("cpu")), [group.samples for group in GROUPS]
    padded, packed = (
        kind.answers(model, pack(samples), entropies=False).router_loss for pack in (pack_groups, pack_without_padding)
    )
    torch.testing.assert_close(padded, packed, rtol=1e-5, atol=1e-6)


def trained(make_worker, reader, experts, **changes):
    """The gradient of one step on all groups in one micro-batch, and the worker."""
    settings = ActorSettings(
        model=experts,
        algorithm=preset("grpo", group_size=2, **{k: v for k, v in changes.items() if k.startswith("router")}),
        optimizer=OptimizerSettings(learning_rate=1e-2, epsilon=1e-3, max_grad_norm=1e9),
        backend=changes.get("backend", BackendSettings()),
        micro_batch_groups=len(GROUPS),
        num_prompts=len(GROUPS),
        max_completion_tokens=NUM_TOKENS,
        temperature=1.0,
    )
    settings = dataclasses.replace(settings, max_tokens_per_micro_batch=changes.get("budget"))
    actor = make_worker(Actor, settings, num_items=len(GROUPS))
    actor.train(reader([GROUPS]))
    return actor


def gradient(actor):
    return torch.cat([parameter.grad.flatten() for parameter in actor._backend._model.parameters()])


@pytest.mark.parametrize("budget", [None, 100])
def test_the_actors_gradient_has_it_with_its_weight(make_worker, reader, experts, budget):
    kind = TokenModel(experts, 1.0, balances_routers=True)
    model = kind.build(torch.device("cpu"))
    loss = kind.answers(model, pack_groups([group.samples for group in GROUPS]), entropies=False).router_loss
    (COEF * loss).backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    expected = torch.cat([part.flatten() for part in parts])
    plain = gradient(trained(make_worker, reader, experts, budget=budget))
    actor = trained(make_worker, reader, experts, budget=budget, router_aux_coef=COEF)
    torch.testing.assert_close(gradient(actor) - plain, expected, rtol=1e-3, atol=1e-5)
    assert merge([actor._host.metrics.drain()])["actor/router_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_fsdp2_learns_the_same(make_worker, reader, experts):
    one, other = (
        trained(make_worker, reader, experts, router_aux_coef=COEF, backend=BackendSettings(name=name))
        for name in ("replicated", "fsdp2")
    )
    for name, weight in one.weights().items():
        torch.testing.assert_close(other.weights()[name].detach(), weight.detach(), rtol=1e-4, atol=1e-5)


def test_models_without_experts_are_refused(model):
    assert has_balanced_routers("qwen3_moe") and has_balanced_routers("mixtral")
    assert not has_balanced_routers("qwen2") and not has_balanced_routers("no_such_model")
    with (
        pytest.raises(ValueError, match=r"has no routers; leave router_aux_coef out"),
        recorded_routers(TokenModel(model, 1.0).build(torch.device("cpu"))),
    ):
        pass

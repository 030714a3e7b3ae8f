"""pi0 and pi0.5 against plain implementations that read their tensors alone (workers_plain_pi.py), in float64: sums of
squares over deviations of 0.1 magnify rounding. transformers' norms and rotary positions stay in float32."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from workers_plain_pi import TEXT, plain_chain_logprobs, plain_predict, plain_prefix, plain_value

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.pi0.policy import Pi0
from rlinf_workers.policies.pi0.processor import prepare_pictures
from rlinf_workers.policies.pi05.policy import Pi05
from rlinf_workers.roles.records.embodied import texts_of
from rlinf_workers.testing.policies import random_fields

pytest.importorskip("transformers", minversion="5.17")

FIELDS = {
    "state": FieldSpec(shape=(4,), dtype="float32"),
    "image.front": FieldSpec(shape=(20, 28, 3), dtype="uint8"),
    "image.hand": FieldSpec(shape=(28, 28, 3), dtype="uint8"),
    "instruction": FieldSpec(shape=(), dtype="text"),
}
BOUNDS = torch.ones(3)
ACTIONS = ActionSpec(kind="continuous", shape=(3,), low=-BOUNDS, high=BOUNDS)
SMALL = {"chunk_size": 2, "width": 32, "num_layers": 2, "image_size": 28, "value_width": 8}
NUM_HEADS = 2
NUM_ROWS = 2


def small_policy(policy_class: type[Pi0], **options) -> Pi0:
    """In float64, its adaptive norms random, as those of a new model are no function of the time."""
    policy = policy_class(FIELDS, ACTIONS, seed=3, **(SMALL | options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "norm.dense" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    policy.double()
    if not isinstance(policy, Pi05):  # transformers has them in float32, which moves angles by 1e-4
        periods = 0.004 * 1000 ** torch.linspace(0, 1, 16, dtype=torch.float64)
        policy.model.embed_action_time.sinusoid_embeds.sinusoid_freq = 2 * math.pi / periods
    return policy


def weights_of(policy: Pi0) -> dict[str, Tensor]:
    """The model's by their own names, the heads' by theirs; with gradients of their own."""
    return {n.removeprefix("model."): p.detach().clone().requires_grad_() for n, p in policy.named_parameters()}


def prompts_of(policy: Pi0, fields: dict[str, Tensor]) -> list[list[int]]:
    texts = texts_of(fields["instruction"])
    if isinstance(policy, Pi05):
        bins = np.digitize(fields["state"].numpy(), np.linspace(-1, 1, 257)[:-1]) - 1
        states = (" ".join(map(str, row)) for row in bins.tolist())
        texts = [f"Task: {text}, State: {state};\nAction: " for text, state in zip(texts, states, strict=True)]
    return [[256, *text.encode()] for text in texts]


def pictures_of(fields: dict[str, Tensor]) -> list[Tensor]:
    return [prepare_pictures(fields[f"image.{key}"], 28).double() for key in ("front", "hand")]


@pytest.mark.parametrize("policy_class", [Pi0, Pi05])
@pytest.mark.parametrize(("noise", "value"), [("flow-sde", "vision-language"), ("flow-noise", "expert")])
def test_forward_and_gradients_are_those_of_a_plain_implementation(policy_class, noise, value):
    policy = small_policy(policy_class, noise=noise, value=value, num_denoising_steps=3)
    fields = random_fields(FIELDS, NUM_ROWS)
    fields["state"] = fields["state"].double()
    drawn = torch.randn(NUM_ROWS, policy.noise_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        answer = policy.act(fields, drawn)
    w, pictures, prompts = weights_of(policy), pictures_of(fields), prompts_of(policy, fields)
    states = None if policy_class is Pi05 else fields["state"]
    predict = plain_predict(w, pictures, prompts, states, NUM_HEADS)
    chain, steps = answer.extras["chain"], answer.extras.get("noisy_step")
    logprobs = plain_chain_logprobs(predict, chain, steps, w)
    if value == "expert":  # the mean over the steps
        step_features = [predict(chain[:, k], 1 - k / 3)[0].mean(1) for k in range(3)]
        values = torch.stack([plain_value(features, w) for features in step_features]).mean(0)
    else:
        prefixes = [plain_prefix(w, [p[i] for p in pictures], ids, NUM_HEADS)[0] for i, ids in enumerate(prompts)]
        values = plain_value(torch.stack([x.mean(0) for x in prefixes]), w)
    evaluated = policy.evaluate(fields, answer.actions, answer.extras)
    for outputs in (answer, evaluated):
        of_rows = outputs.logprobs.reshape(NUM_ROWS, -1).sum(1)
        torch.testing.assert_close(of_rows, logprobs.sum((1, 2)), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(outputs.values, values, rtol=1e-6, atol=1e-6)
    (evaluated.logprobs.sum() + evaluated.values.sum()).backward()
    (logprobs.sum() + values.sum()).backward()
    checked = 0
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            expected = w[name.removeprefix("model.")].grad
            assert expected is not None, name
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-5, msg=name)
            checked += 1
    assert checked > 60


@pytest.mark.parametrize("policy_class", [Pi0, Pi05])
def test_the_ode_and_imitation_are_those_of_a_plain_implementation(policy_class):
    policy = small_policy(policy_class, num_denoising_steps=2)
    fields = random_fields(FIELDS, NUM_ROWS)
    fields["state"] = fields["state"].double()
    with torch.no_grad():
        states = None if policy_class is Pi05 else fields["state"]
        predict = plain_predict(weights_of(policy), pictures_of(fields), prompts_of(policy, fields), states, NUM_HEADS)
        chunk = policy.evaluation_start(fields["state"])
        for time in (1.0, 0.5):
            chunk = chunk - 0.5 * predict(chunk, time)[1]
        torch.testing.assert_close(policy.act(fields, None).actions, chunk, rtol=1e-6, atol=1e-6)
        noise = torch.zeros(NUM_ROWS, policy.noise_size, dtype=torch.float64)
        noise[:, :6] = torch.linspace(-1, 1, 6)
        actions = torch.rand(NUM_ROWS, 2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        start, time = noise[:, :6].view(-1, 2, 3), 0.001 + 0.999 * 0.5 ** (2 / 3)
        velocity = predict(time * start + (1 - time) * actions, time)[1]
        expected = (velocity - (start - actions)).square().mean((1, 2))
        torch.testing.assert_close(policy.imitate(fields, actions, noise), expected, rtol=1e-6, atol=1e-6)


def test_words_are_scaled_and_pictures_are_not():
    """The plain implementation would not notice if both sides had forgotten it: the norm undoes a scale of all."""
    policy = small_policy(Pi0)
    words = weights_of(policy)[TEXT + "embed_tokens.weight"]
    scaled = policy.model.model.vlm.get_input_embeddings()(torch.arange(5))
    torch.testing.assert_close(scaled, words[:5] * 32**0.5, rtol=1e-6, atol=1e-6)

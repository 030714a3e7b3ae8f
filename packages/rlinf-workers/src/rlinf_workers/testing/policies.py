"""The conformance suite of policies and action heads, for custom and shipped ones.

    from rlinf_workers.testing.policies import check_policy
    check_policy(MyPolicy, fields={"state": FieldSpec(shape=(4,), dtype="float32")}, actions=spec, width=32)

Every function raises AssertionError with the expected and the actual value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import Fields, Needs, Policy, PolicyStep
from rlinf_workers.policies.heads.base import ActionHead
from rlinf_workers.roles.records.embodied import text_tensor

NUM_ROWS = 6


def check_policy(
    policy_class: type[Policy],
    fields: Mapping[str, FieldSpec],
    actions: ActionSpec,
    *,
    bound: float = 1e-5,
    **options: Any,
) -> None:
    """Checks the whole contract of `Policy`, for an environment that shows `fields` and takes `actions`.

    Args:
        bound: how far, absolutely and relatively, outputs and losses may move if other rows share the batch, or if
            `evaluate` computes them instead of `act`.
    """
    needs = policy_class.needs(fields, actions, **options)
    assert not set(needs.reads) - set(fields), f"needs() reads {needs.reads}, and there are {sorted(fields)}"
    batch = random_fields({name: fields[name] for name in needs.reads}, NUM_ROWS)
    policy = policy_class(fields, actions, seed=1, **options)
    policy.absorb(policy.observation_sums(batch))
    noise = torch.randn(NUM_ROWS, policy.noise_size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        answer = policy.act(batch, noise)
        _check_answer(answer, actions, needs)
        _check_same(policy.act(batch, noise), answer, 0.0, "the same fields and noise")
        if policy.values_cost_less:
            _close(policy.values(batch), answer.values, bound, "values() are others than those of act()")
        _check_same(policy.act(batch, None), policy.act(batch, None), 0.0, "no noise, the likeliest actions,")
        for rows in (slice(1, 3), torch.tensor([3, 0, 5])):
            alone = policy.act({name: values[rows] for name, values in batch.items()}, noise[rows])
            _check_same(alone, answer.rows(rows), bound, f"rows {rows} in a batch of their own")
    _check_evaluation(policy, batch, answer, bound)
    _check_imitation(policy, batch, answer.actions, bound)
    one, other, third = (policy_class(fields, actions, seed=seed, **options) for seed in (1, 1, 3))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), f"the same arguments gave other weights: {name}"
    with torch.no_grad():
        for name, tensor in third.state_dict().items():
            tensor.copy_(policy.state_dict()[name])
        _check_same(third.act(batch, noise), answer, 0.0, "the weights of state_dict(), copied into another policy,")
        separate = copy.deepcopy(third)  # acts in the step before, while the original receives the weights of the next
        for tensor in third.state_dict().values():
            tensor.zero_()
        _check_same(separate.act(batch, noise), answer, 0.0, "a deep copy of a policy whose weights have changed since")
    whole = policy.observation_sums(batch)
    assert whole.dtype == torch.float64, f"observation_sums() are {whole.dtype}, not float64"
    parts = [{name: values[rows] for name, values in batch.items()} for rows in (slice(0, 2), slice(2, None))]
    _close(sum(map(policy.observation_sums, parts), torch.zeros(())), whole, 1e-9, "sums over parts")


def random_fields(specs: Mapping[str, FieldSpec], num_rows: int, seed: int = 0) -> dict[str, Tensor]:
    """[n, ...] for each field: normal numbers, any bytes, or a few words."""
    generator = torch.Generator().manual_seed(seed)
    fields = {}
    for name, spec in specs.items():
        if spec.dtype == "text":
            fields[name] = text_tensor([f"put {i} on the table" for i in range(num_rows)])
        elif spec.dtype == "uint8":
            fields[name] = torch.randint(256, (num_rows, *spec.shape), generator=generator, dtype=torch.uint8)
        else:
            fields[name] = torch.randn(num_rows, *spec.shape, generator=generator)
    return fields


def check_head(head: ActionHead, num_samples: int = 40_000) -> None:
    """The entropy equals the mean of -log p over samples, within 5 standard errors, computed in float64; the mode is at
    least as likely as any sample."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(head.num_outputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(num_samples, head.num_outputs, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        rows = outputs.expand(num_samples, -1)
        surprise = -head.double().log_prob(rows, head.sample(rows, noise)).sum(-1)
        expected, least = float(head.entropy(outputs).sum()), -float(head.log_prob(outputs, head.mode(outputs)).sum())
    error = float(surprise.std()) / num_samples**0.5
    entropy = float(surprise.mean())
    assert abs(entropy - expected) <= 5 * error, f"entropy {expected}; what is drawn has {entropy} +- {error}"
    assert least <= float(surprise.min()) + 1e-9, "a sample was more likely than the mode"


def _check_answer(answer: PolicyStep, spec: ActionSpec, needs: Needs) -> None:
    num_actions = needs.chunk_size
    shape = [NUM_ROWS, num_actions, spec.low.numel()]
    assert list(answer.actions.shape) == shape, f"actions have shape {list(answer.actions.shape)}; [n, K, A] is {shape}"
    assert answer.actions.dtype == spec.dtype, f"{spec.kind} actions are {spec.dtype}, not {answer.actions.dtype}"
    if spec.kind == "discrete":
        choices = (spec.high - spec.low + 1).flatten()
        in_range = (answer.actions >= 0) & (answer.actions < choices)
        assert in_range.all(), f"each dimension counts from 0 on, below {choices.tolist()}: {answer.actions.tolist()}"
    actual = list(answer.logprobs.shape)
    assert len(actual) == 3, f"logprobs have shape {actual}; [n, K, D] is [{NUM_ROWS}, {num_actions}, D]"
    assert actual[:2] == shape[:2], f"logprobs have shape {actual}; [n, K, D] is [{NUM_ROWS}, {num_actions}, D]"
    shape = shape[:2] if needs.values_of_actions else shape[:1]
    assert list(answer.values.shape) == shape, f"values have shape {list(answer.values.shape)}, not {shape}"
    for name in ("logprobs", "values"):
        values = getattr(answer, name)
        assert values.isfinite().all(), f"{name} are not finite: {values}"
    for name, values in answer.extras.items():
        assert len(values) == NUM_ROWS, f"extras[{name!r}] has shape {list(values.shape)}; the first of {NUM_ROWS} rows"


def _check_same(actual: PolicyStep, expected: PolicyStep, bound: float, what: str) -> None:
    for name in ("actions", "logprobs", "values"):
        _close(getattr(actual, name), getattr(expected, name), bound, f"{what} gave other {name}")
    assert actual.extras.keys() == expected.extras.keys(), f"{what} gave other extras: {sorted(actual.extras)}"
    for name, values in expected.extras.items():
        _close(actual.extras[name], values, bound, f"{what} gave other extras[{name!r}]")


def _close(actual: Tensor, expected: Tensor, bound: float, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound, msg=lambda text: f"{what}: {text}")


def _check_evaluation(policy: Policy, fields: Fields, answer: PolicyStep, bound: float) -> None:
    evaluation = policy.evaluate(fields, answer.actions, answer.extras)
    for name in ("logprobs", "values"):
        actual = getattr(evaluation, name).detach()
        _close(actual, getattr(answer, name), bound, f"evaluate() of what act() answered gave other {name}")
    shape = list(evaluation.entropies.shape)
    assert shape == list(answer.logprobs.shape), f"entropies have shape {shape}; logprobs {list(answer.logprobs.shape)}"
    (evaluation.logprobs.sum() + evaluation.entropies.sum() + evaluation.values.sum()).backward()
    lost = [name for name, p in policy.named_parameters() if p.requires_grad and p.grad is None]
    assert not lost, f"evaluate() gives no gradient to {', '.join(lost)}"


def _check_imitation(policy: Policy, fields: Fields, actions: Tensor, bound: float) -> None:
    """Each row has its own loss, a function of fields, actions and noise, and gradient steps lower it."""
    noise = torch.randn(NUM_ROWS, policy.noise_size, generator=torch.Generator().manual_seed(4))
    losses = policy.imitate(fields, actions, noise)
    assert losses.shape == (NUM_ROWS,), (
        f"imitate() has shape {list(losses.shape)}; one loss for each of {NUM_ROWS} rows"
    )
    assert losses.isfinite().all(), f"imitate() is not finite: {losses}"
    _close(policy.imitate(fields, actions, noise), losses, 0.0, "imitate() of the same rows and noise")
    some = slice(1, 3)
    alone = policy.imitate({name: values[some] for name, values in fields.items()}, actions[some], noise[some])
    _close(alone, losses[some], bound, f"imitate() of rows {some} in a batch of their own")
    trained, before = copy.deepcopy(policy), float(losses.detach().mean())
    optimizer = torch.optim.Adam((p for p in trained.parameters() if p.requires_grad), lr=1e-5)
    for _ in range(5):
        optimizer.zero_grad()
        trained.imitate(fields, actions, noise).mean().backward()
        optimizer.step()
    after = float(trained.imitate(fields, actions, noise).detach().mean())
    assert after < before, f"5 steps down its gradient took the mean of imitate() from {before:.6f} to {after:.6f}"


def check_published(policy: Policy, load: Callable[[str], Policy], folder: Path, output: Path) -> list[str]:
    """Checks that a policy survives `write_published`, after changing all of its weights.

    Args:
        load: loads a policy like this one from a folder.
        folder: the checkpoint that the policy started from.
        output: an empty folder.

    Returns: the parameters for which the format has no place.
    Raises: AssertionError.
    """
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.linspace(0, 0.1, parameter.numel()).view_as(parameter).to(parameter.dtype))
    others = list(policy.write_published(output))
    assert sorted(path.relative_to(output) for path in output.rglob("*")) == sorted(
        path.relative_to(folder) for path in folder.rglob("*")
    ), "the files have other names"
    loaded = load(str(output)).state_dict()
    for name, tensor in policy.state_dict().items():
        assert name in others or torch.equal(loaded[name], tensor), f"{name} differs after a round trip"
    return others

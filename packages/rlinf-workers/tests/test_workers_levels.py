"""Chunks, actions and tokens: losses and gradients against sums that are written out element by element, in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_algos import preset
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.metrics import merge
from rlinf_workers.policies.actor_critic.policy import ActorCritic
from rlinf_workers.policies.base import PolicySettings, make_policy
from rlinf_workers.roles.embodied.actor import EmbodiedActor, EmbodiedActorSettings
from rlinf_workers.roles.records.embodied import Trajectory
from rlinf_workers.testing.policies import check_policy
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings

T, N, K, D = 3, 2, 3, 2
FIELDS = {"state": FieldSpec(shape=(4,), dtype="float32")}
ACTIONS = ActionSpec(kind="continuous", shape=(D,), low=-torch.ones(D), high=torch.ones(D))
NUM_EXECUTED = torch.tensor([[3, 3], [2, 3], [3, 1]])
"""[T, N]; the episode of environment 0 terminates within chunk 1, that of environment 1 is cut off in chunk 2."""
GAMMA, LAM, CLIP, VALUE_COEF, ENTROPY_COEF = 0.9, 0.8, 0.1, 0.5, 0.01


class ValuesOfActions(ActorCritic):
    """The actor-critic with as many values as actions: multiples of the one it has."""

    @classmethod
    def needs(cls, fields, actions, **options):
        return replace(super().needs(fields, actions, **options), values_of_actions=True)

    def act(self, fields, noise):
        answer = super().act(fields, noise)
        return replace(answer, values=answer.values[:, None] * torch.arange(1, K + 1))

    def evaluate(self, fields, actions, extras):
        outputs = super().evaluate(fields, actions, extras)
        return replace(outputs, values=outputs.values[:, None] * torch.arange(1, K + 1))


POLICY = PolicySettings(
    name=f"{__name__}:ValuesOfActions",
    fields=FIELDS,
    actions=ACTIONS,
    options={"hidden_sizes": (8,), "chunk_size": K, "normalize_observations": False},
)


def test_a_policy_with_values_of_actions_conforms():
    check_policy(ValuesOfActions, FIELDS, ACTIONS, hidden_sizes=(8,), chunk_size=K)


def trajectory(group: int, *, of_actions: bool) -> Trajectory:
    """Sampled by a policy that is not quite the one in training, so that ratios differ from 1."""
    generator = torch.Generator().manual_seed(group)
    executed = torch.arange(K) < NUM_EXECUTED[..., None]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return Trajectory(
        group=group,
        fields={"state": normal(T, N, 4)},
        actions=normal(T, N, K, D),
        extras={},
        rollout_logprobs=-1.0 + 0.3 * normal(T, N, K, D),
        values=normal(T, N, K) if of_actions else normal(T, N),
        next_values=normal(T, N),
        rewards=normal(T, N, K) * executed,
        num_executed=NUM_EXECUTED,
        terminated=torch.tensor([[False, False], [True, False], [False, False]]),
        truncated=torch.tensor([[False, False], [False, False], [False, True]]),
        policy_version=0,
    )


def settings(policy: PolicySettings = POLICY, **changes: Any) -> EmbodiedActorSettings:
    fixed = {"num_epochs": 1, "num_minibatches": 1, "target_kl": None, "clip_low": CLIP, "clip_high": CLIP}
    fixed |= {"entropy_coef": ENTROPY_COEF}
    if changes.get("name") is None:
        fixed |= {"gamma": GAMMA, "gae_lambda": LAM, "bootstrap_at_termination": False, "value_coef": VALUE_COEF}
    return EmbodiedActorSettings(
        policy=policy,
        algorithm=preset(changes.pop("name", None) or "ppo", samples="episodes", **(fixed | changes)),
        backend=BackendSettings(num_shards=1),
        optimizer=OptimizerSettings(learning_rate=1e-3, max_grad_norm=1e9),
    )


def enumerated_gae(t: Trajectory, reward_level: str) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns, one step after the other from behind; [T, N] or [T, N, K], 0 where nothing was done."""
    values, rewards, after = t.values.double().numpy(), t.rewards.double().numpy(), t.next_values.double().numpy()
    advantages = np.zeros(values.shape)
    for n in range(N):
        steps = []  # index, reward, value, value of what follows, whether the trace goes on
        for s in range(T):
            terminated, ended = bool(t.terminated[s, n]), bool(t.terminated[s, n] | t.truncated[s, n])
            successor = 0.0 if terminated else after[s, n]
            if reward_level == "chunk":
                steps.append(((s, n), rewards[s, n].sum(), values[s, n], successor, not ended))
                continue
            last = int(t.num_executed[s, n]) - 1
            for k in range(last + 1):
                follows = successor if k == last else values[s, n, k + 1]
                steps.append(((s, n, k), rewards[s, n, k], values[s, n, k], follows, not (ended and k == last)))
        carry = 0.0
        for index, reward, value, follows, goes_on in reversed(steps):
            carry = reward + GAMMA * follows - value + (GAMMA * LAM * carry if goes_on else 0.0)
            advantages[index] = carry
    done = (np.arange(K) < NUM_EXECUTED.numpy()[..., None]) if reward_level == "action" else np.ones((T, N))
    return advantages, (advantages + values) * done


LEVELS = [("chunk", "chunk"), ("chunk", "action"), ("chunk", "token"), ("action", "action"), ("action", "token")]


@pytest.mark.parametrize(("reward_level", "ratio_level"), LEVELS)
@pytest.mark.parametrize("whiten", [False, True])
def test_the_first_gradient_is_that_of_an_enumeration(make_worker, reader, reward_level, ratio_level, whiten):
    of_actions = reward_level == "action"
    policy = POLICY if of_actions else replace(POLICY, name="actor_critic")
    batch = [trajectory(group, of_actions=of_actions) for group in range(3)]
    actor_settings = settings(policy, reward_level=reward_level, ratio_level=ratio_level, whiten_advantages=whiten)
    actor = make_worker(EmbodiedActor, actor_settings)
    actor.train(reader([batch]))

    model = make_policy(policy, torch.device("cpu")).double()
    earned = [enumerated_gae(t, reward_level) for t in batch]
    there = [np.ones((T, N), bool) if not of_actions else np.arange(K) < NUM_EXECUTED.numpy()[..., None]] * 3
    counted = np.concatenate([gae[0][which] for gae, which in zip(earned, there, strict=True)])
    mean, std = (counted.mean(), counted.std(ddof=1)) if whiten else (0.0, 1.0)
    loss, num_clipped, num_ratios = torch.zeros(()).double(), 0, 0
    for t, (advantages, returns) in zip(batch, earned, strict=True):
        answers = model.evaluate(
            {"state": t.fields["state"].flatten(0, 1).double()}, t.actions.flatten(0, 1).double(), {}
        )
        for s in range(T):
            for n in range(N):
                row, last = s * N + n, int(t.num_executed[s, n])
                if ratio_level == "chunk":
                    parts = [((slice(None), slice(None)), (s, n))]
                else:
                    places = [(k, slice(None)) for k in range(last)]
                    if ratio_level == "token":
                        places = [(k, d) for k in range(last) for d in range(D)]
                    parts = [(place, (s, n, place[0]) if of_actions else (s, n)) for place in places]
                num_parts = {"chunk": 1, "action": K, "token": K * D}[ratio_level]
                for place, index in parts:
                    advantage = (advantages[index] - mean) / std
                    gap = answers.logprobs[row][place].sum() - t.rollout_logprobs[s, n].double()[place].sum()
                    ratio = gap.exp()
                    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                    worst = torch.minimum(ratio * advantage, clipped * advantage)
                    num_ratios += 1
                    num_clipped += int(clipped * advantage < ratio * advantage)
                    loss = loss - (worst + ENTROPY_COEF * answers.entropies[row][place].sum()) / num_parts
                for k in range(last) if of_actions else [slice(None)]:
                    place = (s, n, k) if of_actions else (s, n)
                    error = (answers.values[row, k] if of_actions else answers.values[row]) - float(returns[place])
                    loss = loss + VALUE_COEF * 0.5 * error.square() / (K if of_actions else 1)
    (loss / (3 * T * N)).backward()
    for (name, mine), theirs in zip(actor._backend._model.named_parameters(), model.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None, name
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=2e-4, atol=1e-6, msg=name)
    recorded = merge([actor._host.metrics.drain()])
    assert num_clipped > 0
    assert recorded["actor/clip_fraction"] == pytest.approx(num_clipped / num_ratios)


def test_the_rewards_of_actions_still_to_come_are_compared_action_by_action(make_worker):
    t = trajectory(0, of_actions=False)
    actor_settings = settings(
        replace(POLICY, name="actor_critic"),
        name="grpo",
        advantage="grpo_steps",
        gamma=GAMMA,
        normalize_std=False,
        reward_level="action",
        ratio_level="action",
    )
    advantages, _, counts = make_worker(EmbodiedActor, actor_settings)._advantages(t)
    assert torch.equal(counts, torch.arange(K) < NUM_EXECUTED[..., None])
    flat = t.rewards.double().movedim(-1, 1).flatten(0, 1)  # [T K, N], of which the first episodes have 5 and 7 actions
    to_go = [
        [sum(GAMMA ** (j - i) * flat[j, n] for j in range(i, end)) for i in range(end)] for n, end in ((0, 5), (1, 7))
    ]
    for i in range(T * K):
        there = [of[i] for of in to_go if i < len(of)]
        for n in range(N):
            expected = to_go[n][i] - sum(there) / len(there) if i < len(to_go[n]) else 0.0
            assert float(advantages[i // K, n, i % K]) == pytest.approx(float(expected), abs=1e-5)


def test_a_ratio_is_1_before_the_first_step_at_every_level(make_worker, reader):
    model = make_policy(replace(POLICY, name="actor_critic"), torch.device("cpu"))
    batch = []
    for group in range(2):
        t = trajectory(group, of_actions=False)
        logprobs = model.evaluate({"state": t.fields["state"].flatten(0, 1)}, t.actions.flatten(0, 1), {}).logprobs
        batch.append(replace(t, rollout_logprobs=logprobs.detach().unflatten(0, (T, N))))
    for level in ("chunk", "action", "token"):
        actor = make_worker(EmbodiedActor, settings(replace(POLICY, name="actor_critic"), ratio_level=level))
        actor.train(reader([batch]))
        recorded = merge([actor._host.metrics.drain()])
        assert recorded["actor/clip_fraction"] == 0
        assert recorded["actor/kl"] == pytest.approx(0, abs=1e-7)

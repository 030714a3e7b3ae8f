"""The actor on episodes: one turn is a completion to the bit; branches change nothing, however they are computed."""

import dataclasses

import pytest
import torch
from workers_rounding import additions_of_transformer, rounding_bound
from workers_trees import turn, written

from rlinf_algos import preset
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.agents.records import AgentTrajectory
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.roles.language.actor import Actor, ActorSettings
from rlinf_workers.roles.language.episodes import group_of
from rlinf_workers.roles.language.reference import Reference
from rlinf_workers.roles.records.language import Prompt, SampleGroup, ScoredGroup
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings
from rlinf_workers.worker import StepContext, Worker

pytestmark = pytest.mark.usefixtures("forked_workers")

NUM_GROUPS, GROUP_SIZE, MOST_TOKENS = 6, 4, 6
ROUNDING = rounding_bound(additions_of_transformer(num_layers=2, width=32, inner_width=64, num_tokens=24))
ALGORITHMS = {
    "grpo": {},
    "ppo": {"num_epochs": 2},
    "reinforce_plus_plus": {"kl_coef": 0.1},
    "rloo": {"kl_coef": 0.1, "overlong_buffer_tokens": 3},
    "dapo": {"overlong_filter": True},
    "dr_grpo": {"kl_coef": 0.1},
    "gspo": {"correction": "truncated", "correction_level": "sequence"},
    "otb": {},
    "gigpo": {"options": {"step_weight": 0.5}},
}


def random_tokens(generator, low=1, high=MOST_TOKENS):
    length = int(torch.randint(low, high + 1, (), generator=generator))
    return torch.randint(2, 13, (length,), generator=generator).tolist()


def plain_and_episodes():
    """Groups of completions, and the same as episodes of one turn."""
    generator, pairs = torch.Generator().manual_seed(0), []
    for index in range(NUM_GROUPS):
        ids = random_tokens(generator)
        prompt = Prompt(index=index, token_ids=torch.tensor(ids), reference_answer="")
        completions = [random_tokens(generator) for _ in range(GROUP_SIZE)]
        rewards = [float(member < index % 4) for member in range(GROUP_SIZE)]
        nodes = [[written("user", ids, -1), turn(one, 0, truncated=len(one) == MOST_TOKENS)] for one in completions]
        episodes = [AgentTrajectory(nodes=one, reward=reward) for one, reward in zip(nodes, rewards, strict=True)]
        group = group_of(prompt, episodes, policy_version=0)
        ref_logprobs = -torch.rand(group.loss_mask.shape, generator=generator) * group.loss_mask
        group = dataclasses.replace(group, ref_logprobs=ref_logprobs)
        plain = SampleGroup(
            prompt=prompt,
            completion_ids=group.completion_ids,
            loss_mask=group.loss_mask,
            rollout_logprobs=group.rollout_logprobs,
            ref_logprobs=ref_logprobs,
            policy_version=5,
            truncated=group.truncated,
        )
        pairs.append((scored(plain, rewards), scored(group, rewards)))
    return [list(groups) for groups in zip(*pairs, strict=True)]


def scored(samples, rewards):
    return ScoredGroup(samples=samples, rewards=torch.tensor(rewards), completions=("",) * len(rewards))


def branched_episodes():
    generator, groups = torch.Generator().manual_seed(1), []
    for index in range(NUM_GROUPS):
        prompt = Prompt(index=index, token_ids=torch.tensor([1, 4]), reference_answer="")
        episodes = []
        for member in range(GROUP_SIZE):
            nodes = [written("user", [1, 4], -1)]
            for number in range(5):
                parent = int(torch.randint(max(0, len(nodes) - 3), len(nodes), (), generator=generator))
                tokens = random_tokens(generator, high=4)
                is_turn = number % 2 == 0
                nodes.append(turn(tokens, parent) if is_turn else written("tool", tokens, parent))
            cause = "tool_service" if (index + member) % 5 == 0 else ""
            episodes.append(AgentTrajectory(nodes=nodes, reward=float(member % 3), cause=cause))
        group = group_of(prompt, episodes, policy_version=5)
        logprobs = -torch.rand(group.loss_mask.shape, generator=generator) * group.loss_mask
        group = dataclasses.replace(group, rollout_logprobs=logprobs, ref_logprobs=logprobs * 0.9)
        groups.append(ScoredGroup(samples=group, rewards=group.rewards, completions=("",) * GROUP_SIZE))
    assert any(len(one.samples.loss_mask) > GROUP_SIZE for one in groups), "some branch"
    return groups


def settings_of(model, name, *, max_tokens=None, backend="replicated"):
    return ActorSettings(
        model=model,
        algorithm=preset(name, max_staleness=0, **ALGORITHMS[name]),
        optimizer=OptimizerSettings(learning_rate=1e-2, epsilon=1e-3),
        critic=OptimizerSettings(learning_rate=1e-2, epsilon=1e-3),
        backend=BackendSettings(name=backend, num_shards=2),
        micro_batch_groups=2,
        max_tokens_per_micro_batch=max_tokens,
        num_prompts=NUM_GROUPS,
        max_completion_tokens=MOST_TOKENS,
        temperature=1.0,
    )


def trained(make_worker, reader, settings, groups):
    """The weights after two steps."""
    actor = make_worker(Actor, settings, num_items=NUM_GROUPS)
    for _ in range(2):
        actor.train(reader([groups]))
    return {name: weight.detach().clone() for name, weight in actor.weights().items()}


@pytest.mark.parametrize(("name", "max_tokens"), [*((name, 24) for name in ALGORITHMS), ("grpo", None), ("gspo", None)])
def test_an_episode_of_one_turn_trains_like_a_completion_to_the_bit(make_worker, reader, model, name, max_tokens):
    settings = settings_of(model, name, max_tokens=max_tokens)
    plain, episodes = (trained(make_worker, reader, settings, groups) for groups in plain_and_episodes())
    for key, weight in plain.items():
        assert_bitwise_equal(episodes[key], weight)


@pytest.mark.parametrize("name", ["ppo", "dr_grpo", "gigpo"])
def test_how_branches_are_computed_changes_rounding_alone(make_worker, reader, model, name):
    groups = branched_episodes()
    padded, packed, small = (
        trained(make_worker, reader, settings_of(model, name, max_tokens=limit), groups) for limit in (None, 1000, 16)
    )
    for key, weight in padded.items():
        torch.testing.assert_close(packed[key], weight, rtol=0, atol=ROUNDING)
        torch.testing.assert_close(small[key], weight, rtol=0, atol=ROUNDING)


class EpisodeLearner(Worker):
    """A rank that gets the groups whose index is its own."""

    def learn(self, settings: ActorSettings) -> dict[str, torch.Tensor]:
        """Two steps; this rank's part of the weights."""
        actor = Actor.__new__(Actor)  # a worker in this one's place
        actor._host, actor.identity = self._host, self.identity
        actor.__init__(settings)
        groups = [group for group in branched_episodes() if group.samples.index % self.num_ranks == self.rank]
        self._host.step = StepContext(step=0, phase="train", seed=0, num_items=NUM_GROUPS)
        for _ in range(2):
            actor.train([groups])  # pyright: ignore
        return {name: part.detach() for name, part in actor.weights().items()}


def test_two_ranks_learn_what_one_learns_of_branches(tmp_path, make_worker, reader, model):
    with launched(LocalLauncher) as launcher:
        ranks = start(launcher, tmp_path, EpisodeLearner, num_ranks=2)
        for backend in ("replicated", "fsdp2"):
            first, second = ranks.call("learn", settings_of(model, "grpo", max_tokens=24, backend=backend))
            one = trained(make_worker, reader, settings_of(model, "grpo", max_tokens=24), branched_episodes())
            for key, weight in one.items():
                if backend == "replicated":
                    assert_bitwise_equal(first[key], weight)
                else:
                    torch.testing.assert_close(torch.cat([first[key], second[key]]), weight, rtol=0, atol=1e-5)


def test_the_reference_of_branches_is_the_same_within_a_budget(make_worker, reader, writer, model):
    logprobs = []
    for limit in (None, 12, 1000):
        reference, out = make_worker(Reference, model, 1.0, BackendSettings(), limit), type(writer)()
        reference.logprobs(reader([[group.samples for group in branched_episodes()]]), out)
        logprobs.append([item.ref_logprobs for item in out.items])
    for other in logprobs[1:]:
        torch.testing.assert_close(other, logprobs[0], rtol=0, atol=ROUNDING)

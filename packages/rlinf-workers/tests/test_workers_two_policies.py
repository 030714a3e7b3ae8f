"""Two policies in one episode: each has an engine, weights, versions, rewards and a trainer of its own."""

import sys
from pathlib import Path

import pytest
import torch
from workers_rollouts import rollout_of_agents

from rlinf_algos import preset
from rlinf_comm import decode, encode
from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, FlowDefinitionError
from rlinf_workers.agents.settings import NamedAgent
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.errors import SettingsRefused
from rlinf_workers.execution.in_process import InProcessWorkers
from rlinf_workers.models.language_model import load_model, load_tokenizer
from rlinf_workers.roles import Actor, ActorSettings, AgentRollout, Reward, RewardSettings
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.trainers import BackendSettings, OptimizerSettings
from rlinf_workers.worker import StepContext

SAMPLING = SamplingSettings(group_size=4, max_new_tokens=5)
TEXTS = ("12", "345", "6")
MAX_TOKENS = 30
COMPARED = (
    *("rollout/entropy", "reward/agent/solver", "reward/agent/judge", "actor/loss", "actor/grad_norm"),
    *("policy/critic/rollout/entropy", "policy/second/actor/loss", "policy/second/actor/grad_norm"),
)
"""Metrics."""

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def rollout_settings(model, partner, monkeypatch):
    """A solver, and a judge with another model and other token ids, which is trained too."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here)
    monkeypatch.setattr(sys, "path", [here, *sys.path])
    agents = {"solver": NamedAgent(), "judge": NamedAgent(folder=partner.folder, trainer="critic")}
    return rollout_of_agents(
        model, SAMPLING, run="workers_harnesses:play_both", agents=agents, max_context_tokens=MAX_TOKENS
    )


def actor_settings(model, policy="") -> ActorSettings:
    return ActorSettings(
        model=model,
        algorithm=preset("grpo"),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        backend=BackendSettings(),
        micro_batch_groups=2,
        num_prompts=len(TEXTS),
        max_completion_tokens=MAX_TOKENS,
        temperature=1.0,
        num_agents=1,
        policy=policy,
    )


def flow_of_two(rollout, model, partner, *, is_random=True) -> Flow:
    reward = RewardSettings(
        rule="exact_match",
        tokenizer_folder=model.folder,
        further_policies=("critic",),
        random_in_training=is_random,
    )
    flow = Flow("two").worker("rollout", AgentRollout, rollout).worker("reward", Reward, reward)
    flow.worker("actor", Actor, actor_settings(model)).worker("critic", Actor, actor_settings(partner, "second"))
    flow.stage("rollout", AgentRollout.generate, reads="prompts", writes="samples")
    flow.stage("reward", Reward.score, reads="samples", writes=("scored", "judged"), needs_device=False)
    flow.stage("actor", Actor.train, reads="scored", dispatch="key", trains=True)
    flow.stage("critic", Actor.train, reads="judged", dispatch="key", trains=True)
    return flow.weights("actor", to="rollout").weights("critic", to="rollout")


@pytest.fixture
def workers(rollout_settings, model, partner):
    own_workers = InProcessWorkers(flow_of_two(rollout_settings, model, partner))
    own_workers.sync("actor", "rollout")
    own_workers.sync("critic", "rollout")
    yield own_workers
    own_workers.close()


def prompts():
    return [
        Prompt(index=index, token_ids=torch.zeros(1, dtype=torch.int64), reference_answer="", text=text)
        for index, text in enumerate(TEXTS)
    ]


def sampled(workers, step=0):
    workers.begin(StepContext(step=step, phase="train", seed=11, num_items=len(TEXTS)))
    groups = [group for whole in workers["rollout"].sample(prompts()) for group in whole]
    return sorted(groups, key=lambda group: group.index)


@pytest.fixture
def scored(reader, writer):
    """Scores groups; returns those of each policy."""

    def score(workers, groups):
        writers = type(writer)(), type(writer)()
        workers["reward"].score(reader([groups]), *writers)
        return [one.items for one in writers]

    return score


def test_each_policy_learns_from_its_own_turns_in_its_own_words(workers, model, partner):
    """Log-probabilities against one forward pass of its model over each row."""
    num_own = len(load_tokenizer(model.folder))
    judge = load_model(partner).model
    for group in sampled(workers):
        part = group.of_policies["critic"]
        assert (group.agents, part.agents) == (("solver",), ("judge",))
        assert group.loss_mask.any(1).tolist() == (group.row_agents == 0).tolist()
        assert part.loss_mask.any(1).tolist() == (part.row_agents == 0).tolist()
        assert int(part.loss_mask.any(1).sum()) == SAMPLING.group_size
        assert group.completion_ids[group.row_agents == 0].max() < num_own
        assert part.prompt.token_ids.min() >= num_own, "the judge reads the task in its own tokens"
        assert part.agent_rewards.tolist() == [[0.5]] * SAMPLING.group_size
        for row in part.loss_mask.any(1).nonzero()[:, 0]:
            history = torch.cat([part.prompt.token_ids, part.completion_ids[row, : part.lengths[row]]])
            with torch.no_grad():
                logprobs = judge(history[None]).logits[0].log_softmax(-1)
            begin = len(part.prompt.token_ids)
            own = logprobs[begin - 1 : -1].gather(1, history[begin:, None])[:, 0]
            mask = part.loss_mask[row, : part.lengths[row]]
            torch.testing.assert_close(part.rollout_logprobs[row, : len(own)], own * mask, atol=2e-5, rtol=0)


def test_each_policy_is_trained_by_its_own_group_and_served_in_its_own_version(workers, scored, reader):
    before = {name: {k: w.clone() for k, w in workers[name].weights().items()} for name in ("actor", "critic")}
    own, judged = scored(workers, sampled(workers))
    assert not any(group.samples.of_policies for group in (*own, *judged))
    assert {group.samples.index for group in judged} == {0, 1, 2}
    workers["critic"].train(reader([judged]))
    workers.sync("critic", "rollout")
    for group in sampled(workers, step=1):
        assert group.tokens_by_version().keys() == {0} and group.policy_version == 0
        part = group.of_policies["critic"]
        assert part.tokens_by_version().keys() == {1} and part.policy_version == 1
    workers["actor"].train(reader([own]))
    for name, target in (("actor", workers["rollout"]), ("critic", workers["rollout"].weight_target("critic"))):
        workers.sync(name, "rollout")
        now = workers[name].weights()
        assert any(not torch.equal(before[name][key], weight) for key, weight in now.items())
        assert all(torch.equal(weight, now[key]) for key, weight in target.weights().items())


def test_the_reward_stage_gives_each_policy_the_rewards_of_its_agents(rollout_settings, model, partner, scored):
    workers = InProcessWorkers(flow_of_two(rollout_settings, model, partner, is_random=False))
    own, judged = scored(workers, sampled(workers))
    workers.close()
    assert all(group.agent_rewards.tolist() == [[1.0]] * SAMPLING.group_size for group in own)
    assert all(group.agent_rewards.tolist() == [[0.5]] * SAMPLING.group_size for group in judged)
    recorded = workers.metrics()
    assert (recorded["reward/agent/solver"], recorded["reward/agent/judge"]) == (1.0, 0.5)


@pytest.mark.slow
def test_a_plan_gives_the_numbers_of_the_loop(tmp_path, workers, scored, reader, rollout_settings, model, partner):
    """Two steps in processes, under leases and with weights synced on both edges."""
    flow, cluster, runs = flow_of_two(rollout_settings, model, partner), Cluster.cpu_slots(1), []
    paths = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    with Executor(cluster=cluster, log_folder=tmp_path, env_vars=paths) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), cluster, "collocated"))
        executor.sync_weights()
        for step in range(2):
            context = StepContext(step=step, phase="train", seed=11, num_items=len(TEXTS))
            runs.append(executor.run(flow, context=context, feeds={"prompts": prompts()}, timeout_s=120.0))
    workers.metrics()
    for step, run in enumerate(runs):
        groups = scored(workers, sampled(workers, step))
        for name, own in zip(("actor", "critic"), groups, strict=True):
            workers[name].train(reader([own]))
            workers.sync(name, "rollout")
        metrics = workers.metrics()
        assert {name: run.metrics[name] for name in COMPARED} == pytest.approx(
            {name: metrics[name] for name in COMPARED}
        )


def test_the_parts_of_policies_survive_the_wire_and_count_in_the_digest(workers):
    group, other, _ = sampled(workers)
    encoded = encode(group)
    again = decode(encoded.header, [bytearray(buffer) for buffer in encoded.buffers])
    assert again.digest() == group.digest()
    again.of_policies["critic"] = other.of_policies["critic"]
    assert again.digest() != group.digest()


def test_policies_that_cannot_be_are_refused(rollout_settings, partner, make_worker):
    agents = rollout_settings.agent.agents
    for wrong, message in (
        ({"solver": NamedAgent(trainer="critic")}, "the job's own policy would not train"),
        ({**agents, "critic": NamedAgent(trainer="critic")}, "begins with .*, but has the model None"),
    ):
        object.__setattr__(rollout_settings.agent, "agents", wrong)
        with pytest.raises(SettingsRefused, match=message):
            make_worker(AgentRollout, rollout_settings)


def test_a_stage_with_writers_for_policies_needs_its_first_ones():
    flow = Flow("few").worker("reward", Reward)
    with pytest.raises(FlowDefinitionError, match="takes 2 ports"):
        flow.stage("reward", Reward.score, reads="samples")

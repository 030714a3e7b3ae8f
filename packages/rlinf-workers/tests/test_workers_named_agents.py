"""Several agents in an episode: conversations, rewards and baselines of their own."""

import asyncio
import json

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from workers_sessions import LIMITS, Script, chatml_template, plain_template
from workers_trees import turn, written

from rlinf_algos import preset
from rlinf_comm import decode, encode
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.agents.messages import RequestRefused
from rlinf_workers.agents.records import AgentTrajectory
from rlinf_workers.agents.sessions import AgentSession
from rlinf_workers.metrics import merge
from rlinf_workers.models.language_model import load_tokenizer
from rlinf_workers.models.sequences import pack_groups
from rlinf_workers.roles.language.advantages import AdvantageMaker, signals, whiten
from rlinf_workers.roles.language.agent_parts import parts_by_agent
from rlinf_workers.roles.language.conversation import conversation
from rlinf_workers.roles.language.episodes import group_of
from rlinf_workers.roles.language.reward import Reward, RewardSettings
from rlinf_workers.roles.records.language import Prompt, ScoredGroup, Segment

ASK = [{"role": "user", "content": "2+3"}]
TRAINED = ("hinter", "guesser")


# -- sessions ----------------------------------------------------------------------------------------------------------


def session_of(replies, **templates):
    template = plain_template()
    script = Script(template, replies, end="<end>")
    agents = {name: templates.get(name, template) for name in ("hinter", "guesser")}
    return AgentSession("s", template, script, LIMITS, agents=agents), script


def test_an_agent_does_not_continue_what_another_has_said():
    session, script = session_of(["ab", "c", "d"])

    async def play():
        (hint,) = await session.chat(ASK, agent="hinter")
        history = [*ASK, hint.message(), {"role": "user", "content": "7"}]
        await session.chat(history, agent="guesser")
        await session.chat(history, agent="hinter")

    asyncio.run(play())
    trajectory = session.trajectory()
    turns = [(node.agent, trajectory.path(index)) for index, node in enumerate(trajectory.nodes) if node.sampled]
    assert [agent for agent, _ in turns] == ["hinter", "guesser", "hinter"]
    assert [script.agents[number] for number in range(3)] == ["hinter", "guesser", "hinter"]
    speakers = [{trajectory.nodes[node].agent for node in path} - {""} for _, path in turns]
    assert speakers == [{"hinter"}, {"guesser"}, {"hinter"}]
    assert session.counts["continued"] == 1 and not session.counts["branches"] and not session.counts["roots"]


def test_each_agent_reads_and_writes_with_its_own_template():
    chatml = chatml_template()
    session, script = session_of(["ab", "c"], guesser=chatml)

    async def play():
        await session.chat(ASK, agent="hinter")
        (guess,) = await session.chat(ASK, agent="guesser")
        return guess

    guess = asyncio.run(play())
    assert chatml.text.decode(script.prompts[1]).startswith("<|im_start|>user")
    assert session.token_texts(guess) == tuple(chatml.text.decode([token]) for token in guess.token_ids)


@pytest.mark.parametrize("agent", ["", "policy"])
def test_an_agent_that_does_not_exist_is_refused_with_those_that_do(agent):
    session, _ = session_of(["ab"])
    with pytest.raises(RequestRefused, match=r"none of this job's agents, hinter, guesser"):
        asyncio.run(session.chat(ASK, agent=agent))
    with pytest.raises(RequestRefused, match=r"none of this job's agents, hinter, guesser"):
        session.reward(1.0, agent=agent)
    assert not session.trajectory().nodes


def test_a_job_without_agents_by_name_refuses_a_name():
    template = plain_template()
    session = AgentSession("s", template, Script(template, ["ab"], end="<end>"), LIMITS)
    with pytest.raises(RequestRefused, match=r"no agents by name \(rollout.agent.agents\)"):
        asyncio.run(session.chat(ASK, agent="judge"))


# -- rows --------------------------------------------------------------------------------------------------------------


def talk(hint=(5, 2), guess=(6, 3, 2), *, frozen=False, **options):
    """A hint and, in a conversation of its own, a guess; and perhaps the remark of an agent that does not train."""
    nodes = [written("user", [1, 4], -1), turn(hint, 0, agent="hinter")]
    if guess:
        nodes += [written("user", [1, *hint[:-1]], -1), turn(guess, len(nodes), agent="guesser")]
    if frozen:
        nodes += [written("user", [90, 91], -1), turn([92, 93], len(nodes), agent="judge", versions=[(2, -1)])]
    return AgentTrajectory(nodes=nodes, **options)


def grouped(*trajectories, index=0, agents=TRAINED):
    prompt = Prompt(index=index, token_ids=torch.tensor([1]), reference_answer="")
    return group_of(prompt, trajectories, policy_version=9, agents=agents)


def scored(*trajectories, index=0, agents=TRAINED):
    samples = grouped(*trajectories, index=index, agents=agents)
    rewards = samples.agent_rewards.where(~samples.agent_rewards.isnan(), samples.rewards[:, None])
    return ScoredGroup(samples=samples, rewards=samples.rewards, agent_rewards=rewards, completions=())


def test_rows_and_turns_say_whose_they_are():
    samples = grouped(talk(reward=1.0, frozen=True), talk(guess=(), reward=0.0))
    assert samples.agents == TRAINED
    assert samples.row_agents.tolist() == [0, 1, -1, 0]
    assert samples.turn_agents.tolist() == [[0, 1], [0, -1]]
    assert samples.turns[0].max() == 0 and samples.turns[1].max() == 1
    speakers = [{one.agent for one in segments} - {""} for segments in samples.segments]
    assert speakers == [{"hinter"}, {"guesser"}, {"judge"}, {"hinter"}]


def test_an_agent_that_does_not_train_has_no_loss_and_does_not_limit_the_prompt():
    samples = grouped(talk(reward=1.0, frozen=True), talk(reward=0.0))
    assert samples.prompt.token_ids.tolist() == [1]
    assert samples.loss_mask.any(1).tolist() == [True, True, False, True, True]
    assert samples.completion_ids[2, :4].tolist() == [90, 91, 92, 93]
    assert samples.segments[2][1] == Segment(num_tokens=2, policy_version=-1, agent="judge")
    assert samples.policy_version == 5 and samples.tokens_by_version() == {5: 10}
    assert pack_groups([samples]).completion_ids.max() < 90  # it may be beyond the vocabulary of the policy


def test_agents_that_share_the_task_share_its_tokens():
    nodes = [written("user", [1, 4], -1), turn([5, 2], 0, agent="hinter"), turn([6, 2], 0, agent="guesser")]
    samples = grouped(AgentTrajectory(nodes=nodes, reward=1.0))
    assert samples.prompt.token_ids.tolist() == [1, 4] and samples.row_agents.tolist() == [0, 1]
    assert samples.loss_mask.sum(1).tolist() == [2, 2]


def test_an_agent_has_its_own_reward_or_that_of_the_episode_and_those_of_its_turns():
    own = talk(reward=1.0, rewards={"hinter": -0.5})
    each = talk(rewards={"hinter": -1.0, "guesser": 1.5})
    unscored = talk(rewards={"hinter": 0.5})
    nodes = [*talk().nodes[:3], turn([6, 2], 2, agent="guesser", reward=0.25)]
    by_turn = AgentTrajectory(nodes=nodes, reward=1.0)
    lost = talk(reward=1.0, rewards={"hinter": 1.0}, cause="service")
    samples = grouped(own, each, unscored, by_turn, lost)
    assert samples.agent_rewards[[0, 1, 3]].tolist() == [[-0.5, 1.0], [-1.0, 1.5], [1.0, 1.25]]
    assert samples.agent_rewards[2, 0] == 0.5 and samples.agent_rewards[2, 1].isnan()
    assert samples.agent_rewards[4].isnan().all()
    assert samples.rewards[[0, 1, 3]].tolist() == [1.0, 0.25, 1.25]
    assert samples.rewards[2].isnan()  # the rule scores it


def test_groups_of_agents_survive_the_wire_and_their_digest_knows_the_rewards():
    samples = grouped(talk(reward=1.0, frozen=True), talk(reward=0.0))
    encoded = encode(samples)
    again = decode(encoded.header, [bytearray(buffer) for buffer in encoded.buffers])
    assert again.digest() == samples.digest() and again.agents == TRAINED
    other = grouped(talk(reward=1.0, rewards={"hinter": 0.5}, frozen=True), talk(reward=0.0))
    assert other.digest() != samples.digest()


# -- advantages --------------------------------------------------------------------------------------------------------


def learning_of(groups, name="grpo", values=None, **changes):
    return AdvantageMaker(preset(name, **changes), max_completion_tokens=40).make(groups, values)


def grpo(values):
    values = np.asarray(values, dtype=np.float64)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-4)


def test_an_agent_is_compared_with_itself_where_it_had_a_turn():
    group = scored(
        talk(reward=1.0, rewards={"hinter": 3.0}, frozen=True),
        talk(guess=(), reward=0.0, rewards={"hinter": -0.5}),
        talk(reward=0.25, cause="service"),
        talk(reward=0.5),
        talk(reward=0.0),
    )
    (learned,) = learning_of([group])
    hinter, guesser = grpo([3.0, -0.5, 0.5, 0.0]), grpo([1.0, 0.5, 0.0])
    expected = [hinter[0], guesser[0], 0.0, hinter[1], 0.0, hinter[2], guesser[1], hinter[3], guesser[2]]
    np.testing.assert_allclose(learned.advantages.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert learned.rewards is group.rewards


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(["grpo", "opo", "gigpo", "rloo", "reinforce_plus_plus", "grpo_steps"]))
def test_the_parts_of_an_agent_train_like_episodes_that_it_played_alone(data, name):
    """Bit for bit: the same conversations in a group without names."""
    drawn, alone = [], {agent: [] for agent in TRAINED}
    for _ in range(data.draw(st.integers(1, 4))):
        rewards = {agent: data.draw(st.sampled_from([0.0, 0.5, 1.0, -2.0])) for agent in TRAINED}
        nodes, cause = [], data.draw(st.sampled_from(["", "", "time"]))
        for agent in data.draw(st.permutations(TRAINED)):
            own = []
            for number in range(data.draw(st.integers(0, 2))):
                tokens = data.draw(st.lists(st.integers(3, 6), min_size=1, max_size=3))
                reward, state = data.draw(st.sampled_from([None, 0.5])), data.draw(st.sampled_from(["", "a"]))
                parent = written("user", [1, 4] if not number else [7], len(own) - 1)
                own += [parent, turn(tokens, len(own), reward=reward, state=state, agent=agent)]
            if own:
                bare = [msgspec.structs.replace(node, agent="") for node in own]
                alone[agent].append(AgentTrajectory(nodes=bare, reward=rewards[agent], cause=cause))
                nodes += [after(node, len(nodes)) for node in own]
        if nodes:
            drawn.append(AgentTrajectory(nodes=nodes, rewards=rewards, reward=0.0, cause=cause))
    if not drawn:
        return
    more = {"advantage": "turn_returns"} if name == "grpo_steps" else {}
    base = "grpo" if name in ("opo", "grpo_steps") else name
    more |= {"advantage": "opo", "normalize_std": None} if name == "opo" else {}
    group = scored(*drawn)
    (learned,) = learning_of([group], base, **more)
    for number, agent in enumerate(TRAINED):
        if not alone[agent]:
            continue
        samples = group_of(group.samples.prompt, alone[agent], policy_version=9)
        separate = ScoredGroup(samples=samples, rewards=samples.rewards, completions=())
        (expected,) = learning_of([separate], base, **more)
        mine = learned.advantages[group.samples.row_agents == number]
        if mine.ndim == 1:
            assert_bitwise_equal(mine, expected.advantages)
            continue
        ours = mine[group.samples.loss_mask[group.samples.row_agents == number] != 0]
        assert_bitwise_equal(ours, expected.advantages[samples.loss_mask != 0])


def after(node, num_nodes):
    """The node in a tree that has other nodes before it."""
    return node if node.parent < 0 else msgspec.structs.replace(node, parent=node.parent + num_nodes)


def test_gae_gives_each_agent_the_reward_on_its_own_last_token():
    group = scored(talk(reward=1.0, rewards={"hinter": -2.0}, frozen=True), talk(reward=0.5))
    mask = group.samples.loss_mask
    values = torch.zeros(mask.shape)
    (learned,) = learning_of([group], "ppo", {0: values}, gamma=1.0, gae_lambda=1.0)
    rewards = torch.tensor([-2.0, 1.0, 0.0, 0.5, 0.5])
    torch.testing.assert_close(learned.returns, rewards[:, None] * mask)
    assert learned.values is values and learned.shares is None


def test_a_sequence_is_the_part_of_an_agent_in_an_episode():
    nodes = [*talk().nodes, turn([7, 7, 7, 2], 0, agent="hinter")]
    group = scored(AgentTrajectory(nodes=nodes, reward=1.0), talk(reward=0.0))
    (learned,) = learning_of([group])
    assert group.samples.row_agents.tolist() == [0, 1, 0, 0, 1]
    torch.testing.assert_close(learned.shares, torch.tensor([2 / 6, 1.0, 4 / 6, 1.0, 1.0]))


def test_a_group_has_a_signal_if_one_of_its_agents_has():
    same = scored(talk(reward=1.0), talk(reward=1.0))
    hinter = scored(talk(reward=1.0, rewards={"hinter": 0.0}), talk(reward=1.0))
    guesser = scored(talk(reward=1.0), talk(guess=(), reward=0.0, rewards={"hinter": 1.0}), talk(reward=1.0))
    assert signals([same, hinter, guesser]) == [False, True, False]


class OneShard:
    shards = (0,)

    def sum_over_shards(self, rows):
        return rows.sum(0)


def test_advantages_are_whitened_for_each_agent():
    groups = [scored(talk(reward=1.0, rewards={"hinter": 30.0}), talk(reward=0.0, rewards={"hinter": -10.0}))]
    groups.append(scored(talk(reward=4.0, frozen=True), talk(reward=0.5), index=1))
    learned = learning_of(groups, "grpo", normalize_std=False)
    raw = [one.advantages.clone() for one in learned]
    whiten(learned, lambda index: 0, OneShard(), num_agents=2)
    for agent in range(2):
        before, after = [], []
        for one, own in zip(learned, raw, strict=True):
            rows = one.samples.row_agents == agent
            counts = one.samples.loss_mask[rows].sum(1).long()
            before.append(own[rows].repeat_interleave(counts))
            after.append(one.advantages[rows].repeat_interleave(counts))
        before, after = torch.cat(before).double(), torch.cat(after).double()
        torch.testing.assert_close(after, (before - before.mean()) / before.std(), atol=1e-4, rtol=1e-4)


def test_the_parts_of_a_group_have_its_causes_and_states():
    group = scored(talk(guess=(), reward=0.0), talk(reward=1.0, cause="turns"), talk(reward=0.5, cause="service"))
    hinter, guesser = parts_by_agent(group)
    assert hinter.group.samples.causes == ("", "turns", "service")
    assert guesser.group.samples.causes[0] == "turns" and guesser.group.samples.turns.max() == 0
    assert guesser.group.rewards[0] == 1.0


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_the_reward_stage_fills_in_records_and_shows_the_rewards_of_agents(model, make_worker):
    tokenizer = load_tokenizer(model.folder)

    def ids(text):
        return list(tokenizer(text)["input_ids"])

    def episode(answer, **options):
        nodes = [written("user", ids("1="), -1), turn([*ids("45"), tokenizer.eos_token_id], 0, agent="hinter")]
        nodes += [written("user", ids("1=7"), -1), turn([*ids(answer), tokenizer.eos_token_id], 2, agent="guesser")]
        return AgentTrajectory(nodes=nodes, **options)

    prompt = Prompt(index=0, token_ids=torch.tensor(ids("1=")), reference_answer="12")
    trajectories = [episode("12", rewards={"hinter": 0.25}), episode("3"), episode("3", cause="service")]
    group = group_of(prompt, trajectories, policy_version=0, agents=TRAINED)
    worker = make_worker(Reward, RewardSettings(rule="exact_match", tokenizer_folder=model.folder, num_shown=1))
    (result,) = worker.score_groups([group])
    assert result.rewards[:2].tolist() == [1.0, 0.0]
    assert result.agent_rewards[:2].tolist() == [[0.25, 1.0], [0.0, 0.0]] and result.agent_rewards[2].isnan().all()
    recorded = merge([worker._host.metrics.drain()])
    assert (recorded["reward/agent/hinter"], recorded["reward/agent/guesser"]) == (0.125, 0.5)
    first, _, lost = worker._host.shown_rows
    assert json.loads(first["agent_rewards"]) == {"hinter": 0.25, "guesser": 1.0} and "agent_rewards" not in lost
    assert [one["agent"] for one in json.loads(first["segments"]) if "agent" in one] == ["guesser"]
    assert json.loads(first["branches"])[0][0]["agent"] == "hinter"


def test_a_conversation_is_read_with_the_tokenizer_of_its_agent(model):
    class Shouted:
        def decode(self, ids, **_):
            return f"{len(ids)}!"

    prompt = Prompt(index=0, token_ids=torch.tensor([1]), reference_answer="")
    nodes = [written("user", [3, 4], -1), turn([5, 6, 7], 0, agent="guesser")]
    group = group_of(prompt, [AgentTrajectory(nodes=nodes)], policy_version=0, agents=TRAINED)
    tokenizers = {"": load_tokenizer(model.folder), "guesser": Shouted()}
    texts = [one["text"] for one in conversation(group, 0, tokenizers)]
    assert texts[-1] == "3!" and len(texts) == len(group.segments[0])

"""Groups of episodes: rows, shared prefixes, segments and rewards, against the trees they were made of."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st
from workers_trees import trees, turn, written

from rlinf_comm import decode, encode
from rlinf_workers.agents.records import AgentTrajectory
from rlinf_workers.errors import WorkersError
from rlinf_workers.roles.language.episodes import group_of
from rlinf_workers.roles.records.language import Prompt, SampleGroup, Segment

PROMPT = Prompt(index=3, token_ids=torch.tensor([1, 4]), reference_answer="7", text="task")


def group(*trajectories, prompt=PROMPT):
    return group_of(prompt, trajectories, policy_version=9)


BRANCHED = AgentTrajectory(
    nodes=[
        written("user", [1, 4], -1),
        turn([5, 2], 0, reward=0.5, state="start"),
        written("tool", [7], 1),
        turn([8, 2], 2, versions=[(1, 6), (1, 7)], state="tool"),
        turn([9, 3, 2], 2, truncated=True),
    ],
    reward=1.0,
)
STRAIGHT = AgentTrajectory(nodes=[written("user", [1, 4], -1), turn([6, 2], 0, state="start")])


def test_a_row_for_each_leaf_trains_each_turn_once():
    samples = group(BRANCHED, STRAIGHT)
    assert samples.prompt.token_ids.tolist() == [1, 4]
    assert samples.prompt.text == "task"
    assert samples.completion_ids.tolist() == [[5, 2, 7, 8, 2, 0], [5, 2, 7, 9, 3, 2], [6, 2, 0, 0, 0, 0]]
    assert samples.loss_mask.tolist() == [[1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0]]
    assert samples.row_lengths.tolist() == [5, 6, 2]
    assert samples.trajectories.tolist() == [0, 0, 1]
    assert samples.shared.tolist() == [0, 3, 0]
    assert samples.shared_with.tolist() == [-1, 0, -1]
    assert samples.turns.tolist() == [[0, 0, -1, 1, 1, -1], [-1, -1, -1, 2, 2, 2], [0, 0, -1, -1, -1, -1]]
    assert samples.truncated.tolist() == [False, True, False]
    torch.testing.assert_close(samples.rollout_logprobs[0], torch.tensor([-0.5, -0.2, 0, -0.8, -0.2, 0]))
    torch.testing.assert_close(samples.rollout_logprobs[1], torch.tensor([0, 0, 0, -0.9, -0.3, -0.2]))
    assert samples.policy_version == 5
    assert samples.num_episodes == 2


def test_segments_say_who_wrote_each_token():
    samples = group(BRANCHED, STRAIGHT)
    first = (
        Segment(num_tokens=2, policy_version=5),
        Segment(num_tokens=1, policy_version=-1, author="tool"),
        Segment(num_tokens=1, policy_version=6),
        Segment(num_tokens=1, policy_version=7),
    )
    assert samples.segments[0] == first
    assert samples.tokens_by_version() == {5: 7, 6: 1, 7: 1}
    longer = AgentTrajectory(nodes=[written("user", [1], -1), written("template", [4, 3], 0), turn([6, 2], 1)])
    assert group(longer, STRAIGHT).segments[0][0] == Segment(num_tokens=1, policy_version=-1, author="template")


def test_rewards_of_episode_and_turns_add_up():
    unscored = AgentTrajectory(nodes=[written("user", [1, 4], -1), turn([6, 2], 0)])
    by_turns = AgentTrajectory(nodes=[written("user", [1, 4], -1), turn([6, 2], 0, reward=0.25, state="start")])
    samples = group(BRANCHED, unscored, by_turns)
    assert samples.rewards[[0, 2]].tolist() == [1.5, 0.25]
    assert samples.rewards[1].isnan()
    assert samples.turn_rewards.tolist() == [[0.5, 0, 0], [0, 0, 0], [0.25, 0, 0]]


def test_turns_begin_in_equal_states_by_name_or_after_equal_tokens():
    other_name = AgentTrajectory(nodes=[written("user", [1, 4], -1), turn([6, 2], 0, state="tool")])
    in_parts = [written("user", [1], -1), written("template", [4], 0), turn([5, 2], 1), written("tool", [7], 2)]
    unnamed = AgentTrajectory(nodes=[*in_parts, turn([3], 3)])
    nameless = AgentTrajectory(nodes=[written("user", [1, 4], -1), turn([6, 2], 0)])
    states = group(BRANCHED, STRAIGHT, other_name, unnamed, nameless).turn_states
    start, tool, after_tool, task = states[0, 0], states[0, 1], states[0, 2], states[3, 0]
    assert len({int(one) for one in (start, tool, after_tool, task)}) == 4
    rest = [[start, -1, -1], [tool, -1, -1], [task, after_tool, -1], [task, -1, -1]]
    assert states[1:].tolist() == torch.tensor(rest).tolist()


def test_the_prompt_ends_where_histories_differ_and_before_any_turn():
    other = AgentTrajectory(nodes=[written("user", [1, 4, 5], -1), turn([5, 2], 0)])
    samples = group(BRANCHED, other)
    assert samples.prompt.token_ids.tolist() == [1, 4]
    assert samples.completion_ids[2].tolist() == [5, 5, 2, 0, 0, 0]
    assert samples.loss_mask[2].tolist() == [0, 1, 1, 0, 0, 0]
    alone = group(other)
    assert alone.prompt.token_ids.tolist() == [1, 4, 5]
    assert alone.loss_mask.tolist() == [[1, 1]]


def test_a_new_history_of_an_episode_is_a_row_that_shares_nothing():
    nodes = [written("user", [1, 4], -1), turn([5, 2], 0), written("user", [1, 8], -1), turn([9, 2], 2)]
    samples = group(AgentTrajectory(nodes=nodes))
    assert samples.prompt.token_ids.tolist() == [1]
    assert samples.completion_ids.tolist() == [[4, 5, 2], [8, 9, 2]]
    assert samples.trajectories.tolist() == [0, 0]
    assert samples.shared_with.tolist() == [-1, -1]


def test_a_discarded_episode_has_no_loss_and_no_reward():
    lost = AgentTrajectory(nodes=BRANCHED.nodes, reward=1.0, cause="tool_service", detail="it crashed")
    empty = AgentTrajectory(nodes=[], cause="engine_lost")
    other = AgentTrajectory(nodes=[written("user", [8], -1)], cause="service")
    samples = group(lost, STRAIGHT, empty, other)
    assert samples.prompt.token_ids.tolist() == [1, 4]
    assert samples.loss_mask.sum(-1).tolist() == [0, 2, 0, 0]
    assert samples.row_lengths.tolist() == [5, 2, 0, 0]
    assert samples.rewards.isnan().tolist() == [True, True, True, True]
    assert samples.is_discarded.tolist() == [True, False, True, True]
    assert samples.details[0] == "it crashed"
    assert samples.policy_version == 5
    assert (samples.turns[0] == -1).all()
    assert sum(one.num_tokens for one in samples.segments[0]) == 5
    nothing = group(empty, lost)
    assert nothing.prompt.token_ids.tolist() == [1, 4]
    assert nothing.policy_version == 9
    assert not nothing.loss_mask.any()


def test_a_leaf_without_a_turn_is_left_out_unless_there_is_no_other():
    nodes = [written("user", [1, 4], -1), turn([5, 2], 0), written("user", [1, 9], -1)]
    assert len(group(AgentTrajectory(nodes=nodes)).loss_mask) == 1
    silent = group(AgentTrajectory(nodes=[written("user", [1, 4], -1)], cause="time", reward=0.0), STRAIGHT)
    assert silent.row_lengths.tolist() == [0, 2]
    assert silent.rewards[0] == 0.0
    assert not silent.is_discarded[0]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([written("user", [2], -1), turn([5], 0)], "begin with different tokens"),
        ([turn([5, 2], -1)], "begin with different tokens, .1. and .5."),
        ([written("user", [1], -1), written("policy", [5], 0)], "node 1 is the policy's, but its tokens are not"),
        ([written("user", [1], -1), turn([5, 2], 0, versions=[(1, 4)])], "2 tokens, 2 log-probabilities, and versions"),
        ([written("user", [1], 0)], "node 0 continues node 0"),
    ],
)
def test_contradictions_are_refused(nodes, message):
    with pytest.raises(WorkersError, match=message):
        group(STRAIGHT, AgentTrajectory(nodes=nodes))


def test_a_history_without_a_prompt_is_refused():
    with pytest.raises(WorkersError, match="begins with a turn of the policy"):
        group(AgentTrajectory(nodes=[turn([5, 2], -1)]))


def test_a_group_of_episodes_crosses_a_process_border():
    samples = group(BRANCHED, STRAIGHT)
    encoded = encode(samples)
    again = decode(encoded.header, [bytearray(buffer) for buffer in encoded.buffers])
    assert again.digest() == samples.digest()
    assert again.segments == samples.segments
    assert again.causes == samples.causes


def test_the_digest_covers_what_others_wrote():
    samples = group(BRANCHED, STRAIGHT)
    ids = samples.completion_ids.clone()
    ids[0, 2] = 11
    assert dataclasses.replace(samples, completion_ids=ids).digest() != samples.digest()
    assert dataclasses.replace(samples, rewards=samples.rewards + 1).digest() != samples.digest()


def test_a_subset_has_what_it_shares_with_rows_outside_by_itself():
    nodes = [*BRANCHED.nodes, written("tool", [7, 7], 4), turn([3], 5), turn([4], 5)]
    samples = group(STRAIGHT, AgentTrajectory(nodes=nodes))
    assert samples.shared.tolist() == [0, 0, 3, 8]
    assert samples.shared_with.tolist() == [-1, -1, 1, 2]
    part = samples.subset(slice(2, 4))
    assert part.shared.tolist() == [0, 8]
    assert part.shared_with.tolist() == [-1, 0]
    assert part.num_episodes == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_rows_are_the_histories_of_the_leaves(trajectories):
    samples = group(*trajectories)
    prompt, rows = samples.prompt.token_ids.tolist(), iter(range(len(samples.loss_mask)))
    for number, trajectory in enumerate(trajectories):
        policy = {index for index, node in enumerate(trajectory.nodes) if node.author == "policy"}
        leaves = [leaf for leaf in trajectory.leaves() if policy & set(trajectory.path(leaf))]
        for leaf in leaves or trajectory.leaves()[:1]:
            row = next(rows)
            length = int(samples.row_lengths[row])
            ids = samples.completion_ids[row, :length].tolist()
            assert prompt + ids == trajectory.token_ids(leaf)
            assert samples.trajectories[row] == number
            assert sum(one.num_tokens for one in samples.segments[row]) == length
            shared, other = int(samples.shared[row]), int(samples.shared_with[row])
            assert samples.completion_ids[other, :shared].tolist() == ids[:shared]
            assert not samples.loss_mask[row, :shared].any()
            assert (other >= 0) == (shared > 0)
            assert other < row
        mine = samples.trajectories == number
        tokens = [node.token_ids for node in trajectory.nodes if node.author == "policy"]
        for place, turn_ids in enumerate(tokens):
            assert samples.completion_ids[mine][samples.turns[mine] == place].tolist() == turn_ids
        assert int(samples.loss_mask[mine].sum()) == sum(map(len, tokens))
        assert ((samples.turns[mine] >= 0) == (samples.loss_mask[mine] > 0)).all()
    assert next(rows, None) is None


def test_a_plain_group_has_a_row_for_each_episode():
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    plain = SampleGroup(
        prompt=PROMPT,
        completion_ids=torch.zeros(2, 2, dtype=torch.int64),
        loss_mask=mask,
        rollout_logprobs=mask,
        policy_version=0,
    )
    assert plain.num_episodes == 2
    assert plain.row_lengths.tolist() == [2, 1]
    assert not plain.is_discarded.any()
    assert plain.by_episode(torch.tensor([3, 4])).tolist() == [3, 4]

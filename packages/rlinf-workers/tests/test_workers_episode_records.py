"""What is kept of the turns of an episode, and an episode that is said again from its record."""

import json
import random

import msgspec
import pytest
import torch

from rlinf_workers.agents.link import EpisodeReport
from rlinf_workers.agents.records import AgentTrajectory, Sampled, TokenNode
from rlinf_workers.agents.replay import RecordedAgents, ask_decision, report_decision
from rlinf_workers.agents.turn_log import EpisodeKey, LateEpisode, TurnLog, pack_episodes, unpack_episodes
from rlinf_workers.roles.language.late_groups import LateGroup
from rlinf_workers.roles.language.open_episodes import OpenEpisodes
from rlinf_workers.roles.records.language import Prompt

KEY: EpisodeKey = (4, 2, 1)


def sampled(token_ids, noise):
    return Sampled(token_ids=token_ids, logprobs=[-1.0] * len(token_ids), versions=[(len(token_ids), 3)], noise=noise)


def node(parent, author, token_ids, noise=0, **more):
    turn = sampled(token_ids, noise) if author == "policy" else None
    return TokenNode(parent=parent, author=author, token_ids=token_ids, sampled=turn, **more)


def test_histories_are_kept_as_what_they_add_to_earlier_ones():
    """Any tree of turns: continued, branched, cut and unrelated histories."""
    draw = random.Random(0)
    log, histories, num_added = TurnLog(keeps_histories=True), {}, 0
    starts = [[1, 2, 3]]
    for noise in range(1, 60):
        history = list(draw.choice(starts))
        history = history[: draw.randint(1, len(history))] + [draw.randrange(9) for _ in range(draw.randint(0, 4))]
        turn = log.add(noise, history)
        num_added += len(turn.added)
        histories[noise] = history
        if draw.random() < 0.8:
            answer = [draw.randrange(9) for _ in range(draw.randint(1, 5))]
            log.end(noise, sampled(answer, noise))
            starts.append(history + answer)
    assert {noise: log.history(noise) for noise in histories} == histories
    assert num_added < sum(map(len, histories.values())) / 2


def test_a_conversation_adds_only_its_new_tokens():
    log = TurnLog(keeps_histories=True)
    log.add(5, [1, 2, 3])
    assert not log.can_continue(5, 5) and log.can_continue(5, 3)
    log.end(5, sampled([7, 8], 5))
    turn = log.add(6, [1, 2, 3, 7, 8, 4])
    assert (turn.base, turn.num_kept, turn.added) == (5, 5, [4]) and log.can_continue(5, 5)


def test_a_log_goes_through_a_checkpoint():
    log = TurnLog(keeps_histories=True)
    log.add(5, [1, 2, 3])
    log.end(5, sampled([7, 8], 5))
    log.add(6, [1, 2, 3, 7, 8, 4]).sampled = sampled([9], 6)
    report = EpisodeReport(episode=9, trajectory=AgentTrajectory(nodes=[node(-1, "user", [1])], cause="time"))
    late = [LateEpisode(member=0, turns=log.turns), LateEpisode(member=1, report=report)]
    again = unpack_episodes(pack_episodes(late))
    assert again == late and unpack_episodes(b"") == []
    other = TurnLog(again[0].turns, keeps_histories=True)
    assert other.history(6) == [1, 2, 3, 7, 8, 4] and not again[0].turns[1].has_ended
    other.end(6, sampled([9, 9], 6))
    assert other.add(7, [1, 2, 3, 7, 8, 4, 9, 9, 0]).added == [0]


TREE = AgentTrajectory(
    nodes=[
        node(-1, "user", [1, 2]),
        node(0, "policy", [3, 4], 11, reward=0.5, state="a"),
        node(1, "tool", [5]),
        node(2, "policy", [6], 12),
        node(2, "policy", [6, 7], 13),
        node(4, "user", [8, 9], differs="edited"),
    ],
    reward=1.0,
    cause="turns",
    detail="no turn is left",
)
"""Two samples of a second turn, and words that nobody has answered. The first of the two has been cut."""
ASKED = {11: [1, 2], 12: [1, 2, 3, 4, 5], 13: [1, 2, 3, 4, 5]}
SAMPLED = {11: sampled([3, 4], 11), 12: sampled([6, 0, 0], 12), 13: sampled([6, 7], 13)}


@pytest.fixture
def decisions():
    """The record of an episode that was heard after 0, 4, 4 and 9 decode steps, as it is read from a file."""
    log, recorded = TurnLog(keeps_histories=True), []
    for noise, after in ((11, 0), (12, 4), (13, 4)):
        recorded.append(ask_decision(KEY, log.add(noise, ASKED[noise]), after))
        log.end(noise, SAMPLED[noise])
    recorded.append(report_decision(KEY, EpisodeReport(episode=3, trajectory=TREE), 9))
    return json.loads(msgspec.json.encode(recorded))


@pytest.mark.parametrize("is_timed", [True, False])
def test_an_episode_is_said_again_when_its_turns_are_there(decisions, is_timed):
    agents, log = RecordedAgents(decisions, is_timed=is_timed), TurnLog(keeps_histories=True)
    logs = {KEY: log}

    def take(num_steps):
        heard = []
        for one in agents.take(logs, num_steps):
            heard.append(one)
            if one.trajectory is None:
                log.add(one.noise, one.token_ids)
                assert one.token_ids == ASKED[one.noise]
        return heard

    assert [one.noise for one in take(0)] == [11]
    assert take(5) == [], "the first turn is being sampled"
    log.end(11, SAMPLED[11])
    if is_timed:
        assert take(3) == [] and agents.next_step(logs, 3) == 4
    assert [one.noise for one in take(4)] == [12, 13]
    log.end(13, SAMPLED[13])
    assert take(9) == []
    log.end(12, SAMPLED[12])
    (over,) = take(9)
    assert over.trajectory == TREE
    assert agents.next_step(logs, 9) is None


def test_a_turn_is_due_when_the_engine_has_nothing_to_do(decisions):
    agents, log = RecordedAgents(decisions, is_timed=True), TurnLog(keeps_histories=True)
    (first,) = agents.take({KEY: log}, None)
    log.add(first.noise, first.token_ids)
    log.end(first.noise, SAMPLED[11])
    assert next(agents.take({KEY: log}, None)).noise == 12


@pytest.mark.parametrize("is_before", [True, False])
def test_an_episode_that_has_not_begun_is_not_overtaken(decisions, is_before):
    """In the record its first turn was asked for together with the last report, with which the stage ended."""
    *asks, over = decisions
    other = (KEY[0], KEY[1] + 1, 0)
    first = ask_decision(other, TurnLog(keeps_histories=True).add(21, [1]), 9)
    last = [first, over] if is_before else [over, first]
    agents, log = RecordedAgents([*asks, *last], is_timed=True), TurnLog(keeps_histories=True)
    for one in agents.take({KEY: log}, 4):
        log.add(one.noise, one.token_ids)
        log.end(one.noise, SAMPLED[one.noise])
    assert list(agents.take({KEY: log}, 9, lambda: [other])) == []
    heard = [one.episode for one in agents.take({KEY: log, other: TurnLog(keeps_histories=True)}, 9)]
    assert heard == ([other, KEY] if is_before else [KEY, other])


def test_the_record_has_no_token_of_the_policy_and_no_other_token_twice(decisions):
    *asks, over = decisions
    assert [one["added"] for one in asks] == [[1, 2], [5], []]
    assert [step["token_ids"] for step in over["script"]["steps"]] == [[], [], [], [], [], [8, 9]]


def test_a_group_is_whole_with_its_last_episode_whatever_ended_before():
    """Late groups leave in this order, so a replay that hears of several episodes at once needs it, too."""
    groups = OpenEpisodes(2, keeps_histories=False)
    for index in (0, 1):
        prompt = Prompt(index=index, token_ids=torch.zeros(1, dtype=torch.int64), reference_answer="")
        groups.open(LateGroup(prompt=prompt, step=4, submitted_index=index, finished=(), unfinished=()))
    list(groups.begin(4))
    report = EpisodeReport(episode=1, trajectory=TREE)
    ended = [(4, 0, 0), (4, 1, 1), (4, 1, 0), (4, 0, 1)]
    whole = [[prompt.index for prompt, *_ in groups.end(key, report)] for key in ended]
    assert whole == [[], [], [1], [0]] and not groups

"""The reward role with episodes: whose reward counts, what is discarded, and what is shown of a conversation."""

import json

import pytest
import torch
from workers_trees import turn, written

from rlinf_algos.rewards import RewardResult
from rlinf_workers.agents.records import AgentTrajectory
from rlinf_workers.metrics import merge
from rlinf_workers.models.language_model import load_tokenizer
from rlinf_workers.roles.language import reward as module
from rlinf_workers.roles.language.episodes import group_of
from rlinf_workers.roles.language.reward import Reward, RewardSettings
from rlinf_workers.roles.records.language import Prompt


@pytest.fixture
def ids(model):
    tokenizer = load_tokenizer(model.folder)
    return lambda text: list(tokenizer(text)["input_ids"])


@pytest.fixture
def end(model):
    return load_tokenizer(model.folder).eos_token_id


@pytest.fixture
def grouped(ids):
    def group(*trajectories, index=0):
        prompt = Prompt(index=index, token_ids=torch.tensor(ids("1=")), reference_answer="12")
        return group_of(prompt, trajectories, policy_version=0)

    return group


@pytest.fixture
def episode(ids, end):
    """A call, its result, and an answer."""

    def trajectory(answer, **options):
        nodes = [
            written("user", ids("1="), -1),
            turn([*ids("45"), end], 0, versions=[(2, 3), (1, 4)]),
            written("tool", ids("67"), 1),
            turn([*ids(answer), end], 2, versions=[(len(ids(answer)) + 1, 4)]),
        ]
        return AgentTrajectory(nodes=nodes, **options)

    return trajectory


def worker_of(make_worker, model, **changes):
    return make_worker(Reward, RewardSettings(rule="exact_match", tokenizer_folder=model.folder, **changes))


def metrics(worker):
    return merge([worker._host.metrics.drain()])


def test_the_rule_scores_last_turns_where_the_harness_gave_no_reward(model, make_worker, grouped, episode, ids, end):
    nodes = episode("12").nodes
    later = AgentTrajectory(nodes=[*nodes, turn([*ids("3"), end], 2)])
    group = grouped(episode("12"), episode("3"), episode("12", reward=0.25), episode("12", cause="engine_lost"), later)
    worker = worker_of(make_worker, model)
    (scored,) = worker.score_groups([group])
    assert scored.rewards[[0, 1, 2, 4]].tolist() == [1.0, 0.0, 0.25, 0.0]
    assert scored.rewards[3].isnan()
    assert scored.completions == ("12", "3", "12", "", "3")
    assert scored.outcomes == ("right", "wrong", "", "", "wrong")
    assert scored.answers[2] is None
    assert metrics(worker)["reward/right"] == pytest.approx(1 / 3)


def test_metrics_leave_out_discarded_episodes_and_count_causes(model, make_worker, grouped, episode):
    group = grouped(
        episode("12", reward=1.0, cause="turns"),
        episode("3", reward=0.0),
        episode("3", reward=0.0, cause="tool_service"),
        episode("3", reward=0.0, cause="turns"),
    )
    lost = grouped(episode("3", cause="harness_lost"), episode("3", cause="harness_lost"), index=1)
    worker = worker_of(make_worker, model)
    scored = worker.score_groups([group, lost])
    recorded = metrics(worker)
    assert recorded["reward/mean"] == pytest.approx(1 / 3)
    assert recorded["reward/std_within_group"] == pytest.approx(float(torch.tensor([1.0, 0.0, 0.0]).std()))
    assert recorded["agent/ended/turns"] == pytest.approx(2 / 6)
    assert recorded["agent/discarded/tool_service"] == pytest.approx(1 / 6)
    assert recorded["agent/discarded/harness_lost"] == pytest.approx(2 / 6)
    assert recorded["agent/ended/time"] == 0.0
    assert scored[1].counted_rewards.tolist() == []
    assert "reward/right" not in recorded


class FailsOn3:
    def __call__(self, completion, reference):
        raise AssertionError("score_batch is called")

    def score_batch(self, completions, references):
        return tuple(
            RewardResult(value=0.0, outcome="crashed", judge_failed=text == "3", detail=f"boom on {text}")
            for text in completions
        )

    def close(self):
        pass


def test_an_episode_on_which_the_rule_fails_is_discarded(model, make_worker, grouped, episode, monkeypatch):
    monkeypatch.setattr(module, "make_reward", lambda rule: FailsOn3())
    worker = worker_of(make_worker, model)
    (scored,) = worker.score_groups([grouped(episode("12"), episode("3"))])
    assert scored.samples.causes == ("", "service")
    assert scored.samples.details[1] == "the reward failed: boom on 3"
    assert scored.rewards[0] == 0.0
    assert scored.rewards[1].isnan()
    assert scored.samples.loss_mask.any(1).tolist() == [True, False]
    assert (scored.samples.turns[1] == -1).all()
    assert metrics(worker)["agent/discarded/service"] == 0.5


def test_no_rule_is_called_where_the_harness_scores(model, make_worker, grouped, episode, monkeypatch):
    monkeypatch.setattr(module, "score_all", lambda *_: pytest.fail("the rule was called"))
    worker = worker_of(make_worker, model)
    (scored,) = worker.score_groups([grouped(episode("12", reward=0.5), episode("3", reward=0.75))])
    assert scored.rewards.tolist() == [0.5, 0.75]
    assert scored.outcomes == ()
    worker.check_failures()


def test_an_episode_that_was_cut_off_without_a_reward_has_that_of_the_settings(model, make_worker, grouped, episode):
    worker = worker_of(make_worker, model, cut_reward=0.25)
    cut = [episode("12", cause="turns"), episode("12", cause="time", reward=0.5), episode("12", cause="service")]
    (scored,) = worker.score_groups([grouped(episode("12"), *cut)])
    assert scored.rewards[:3].tolist() == [1.0, 0.25, 0.5]
    assert scored.rewards[3].isnan()
    assert scored.outcomes == ("right", "", "", "")


def test_rows_show_who_wrote_what(model, make_worker, grouped, episode, ids, end):
    nodes = episode("12").nodes
    branched = AgentTrajectory(nodes=[*nodes, turn([*ids("3"), end], 2)], reward=1.0, cause="tokens", detail="no room")
    worker = worker_of(make_worker, model, num_shown=1)
    worker.score_groups([grouped(branched, episode("3", cause="service"))])
    first, second = worker._host.shown_rows
    end_text = load_tokenizer(model.folder).decode([end])
    call = [
        {"author": "policy", "text": "45", "num_tokens": 2, "version": 3},
        {"author": "policy", "text": end_text, "num_tokens": 1, "version": 4},
        {"author": "tool", "text": "67", "num_tokens": 2},
    ]
    answer = {"author": "policy", "num_tokens": 2, "text": "3" + end_text, "version": 5}
    assert json.loads(first["segments"]) == [*call, answer]
    assert json.loads(first["branches"]) == [
        [*call, {"author": "policy", "text": "12" + end_text, "num_tokens": 3, "version": 4}]
    ]
    assert (first["cause"], first["detail"], first["reward"]) == ("tokens", "no room", 1.0)
    assert first["num_completion_tokens"] == 8
    assert second["cause"] == "service"
    assert "reward" not in second
    assert json.loads(second["segments"])[:3] == call


def test_the_control_tosses_no_coin_for_a_discarded_episode(model, make_worker, grouped, episode):
    worker = worker_of(make_worker, model, random_in_training=True)
    (scored,) = worker.score_groups([grouped(episode("12"), episode("3", cause="service"))])
    assert scored.rewards.isnan().tolist() == [False, True]

"""AgentRollout: groups of episodes, with a real engine and a real agent process."""

import os
import signal
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from workers_rollouts import rollout_of_agents

from rlinf_comm import pack, unpack
from rlinf_workers.agents.settings import NamedAgent
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.errors import ProcessLost, SettingsRefused, WorkersError
from rlinf_workers.models.language_model import load_model, load_tokenizer
from rlinf_workers.roles.language.agent_rollout import AgentRollout
from rlinf_workers.roles.language.late_groups import late_from_start
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.worker import StepContext

SAMPLING = SamplingSettings(group_size=2, max_new_tokens=5)
STEP = StepContext(step=3, phase="train", seed=11, num_items=3)
FRAMEWORKS = ("langgraph>=1.0", "langchain-openai>=1.0", "smolagents[openai]>=1.20")
TEXTS = ("12", "345", "6")


@pytest.fixture
def settings(model, monkeypatch):
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here)
    monkeypatch.setattr(sys, "path", [here, *sys.path])
    return rollout_of_agents(model, SAMPLING, run="workers_harnesses:play_two", max_context_tokens=30)


@pytest.fixture(scope="module")
def python_with_frameworks(tmp_path_factory):
    """The interpreter of a venv with agent frameworks, which takes a minute and a package index."""
    folder = tmp_path_factory.mktemp("frameworks")
    venv.create(folder)
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *FRAMEWORKS], check=True)
    return python


class RecordedAgentRollout(AgentRollout):
    """Keeps its decisions, and follows those of an earlier run."""

    def __init__(self, settings):
        super().__init__(settings)
        self.decisions, self.earlier = [], None

    @property
    def records(self):
        return True

    @property
    def recorded(self):
        return self.earlier

    def decide(self, decision):
        self.decisions.append(decision)


def prompts():
    return [
        Prompt(index=index, token_ids=torch.zeros(1, dtype=torch.int64), reference_answer="", text=text)
        for index, text in enumerate(TEXTS)
    ]


@pytest.fixture
def run(make_worker):
    """Runs the prompts with these settings; returns the groups by index, and the worker."""
    workers = []

    def groups_of(settings, earlier=None):
        worker = make_worker(RecordedAgentRollout, settings)
        workers.append(worker)
        worker._host.step, worker.earlier = STEP, earlier
        worker.weights_received(7)
        groups = {group.index: group for whole in worker.sample(prompts()) for group in whole}
        return groups, worker

    yield groups_of
    for worker in workers:
        worker.close()


def with_agent(settings, **changes):
    return replace(settings, agent=replace(settings.agent, **changes))


def test_every_trained_token_has_the_log_probability_that_the_model_gives_it(run, settings, model):
    """Against one forward pass of the model over each whole history."""
    groups, _ = run(settings)
    assert sorted(groups) == [0, 1, 2]
    loaded = load_model(model)
    for group in groups.values():
        assert group.tokens_by_version().keys() == {7} and len(group.loss_mask) == SAMPLING.group_size
        start = len(group.prompt.token_ids)
        for row, mask in enumerate(group.loss_mask):
            length = int(group.lengths[row])
            history = torch.cat([group.prompt.token_ids, group.completion_ids[row, :length]])
            with torch.no_grad():
                logprobs = loaded.model(history[None]).logits[0].log_softmax(-1)
            own = logprobs[start - 1 : -1].gather(1, history[start:, None])[:, 0]
            places = mask[:length].bool()
            torch.testing.assert_close(group.rollout_logprobs[row, :length][places], own[places], atol=2e-5, rtol=0)
            authors = [segment.author for segment in group.segments[row] if segment.author != "template"]
            assert authors == ["policy", "user", "policy"]  # the template ends turns that a limit has cut


@pytest.mark.parametrize(
    ("agent", "needs_venv"),
    [
        ("workers_harnesses:runs_a_program", False),
        ("workers_sdk_agents:openai_sdk", False),
        pytest.param("workers_sdk_agents:anthropic_sdk", False, marks=pytest.mark.slow),
        pytest.param("workers_sdk_agents:langgraph", True, marks=pytest.mark.slow),
        pytest.param("workers_sdk_agents:smolagents", True, marks=pytest.mark.slow),
    ],
)
def test_what_an_agent_trains_is_what_the_engine_served(make_worker, settings, request, agent, needs_venv):
    """A recorder between engine and agent process: tokens, log-probabilities, versions; each turn is trained once."""
    python = request.getfixturevalue("python_with_frameworks") if needs_venv else None
    worker = make_worker(AgentRollout, with_agent(settings, run=agent, python=python, max_context_tokens=48))
    worker._host.step = STEP
    worker.weights_received(7)
    served, answer = [], worker._agents.answer
    worker._agents.answer = lambda messages: (served.extend(one.sampled for one in messages), answer(messages))
    groups = [group for whole in worker.sample(prompts()) for group in whole]
    worker.close()
    trained = []
    for group in groups:
        assert set(group.causes) == {""} and not group.is_discarded.any()
        versions = group.token_versions()
        for row, segments in enumerate(group.segments):
            begin = 0
            for segment in segments:
                part = slice(begin, begin + segment.num_tokens)
                begin = part.stop
                assert group.loss_mask[row, part].eq(segment.author == "policy").all()
                if segment.author == "policy":
                    tokens, logprobs = group.completion_ids[row, part], group.rollout_logprobs[row, part]
                    trained.append((tokens.tolist(), logprobs.tolist(), set(versions[row, part].tolist())))
    sampled = [(one.token_ids, torch.tensor(one.logprobs).tolist(), {7}) for one in served]
    assert sorted(trained, key=str) == sorted(sampled, key=str)
    assert len(sampled) >= len(groups) * SAMPLING.group_size


def test_the_loop_plays_an_environment_from_one_start_for_all_episodes_of_a_prompt(run, settings):
    environment = {"name": "workers_environments:EndsAtThree", "reward": 0.5}
    groups, _ = run(with_agent(settings, run="loop", environment=environment))
    starts = set()
    for group in groups.values():
        assert group.rewards.tolist() == [1.5, 1.5]
        assert group.turn_rewards.tolist() == [[0.5] * 3] * 2
        starts.add(tuple(group.prompt.token_ids.tolist()[-1:]))
    assert len(starts) > 1


def test_how_many_episodes_run_at_once_changes_nothing(run, settings):
    one, _ = run(with_agent(settings, max_episodes=2))
    all_at_once, _ = run(with_agent(settings, max_episodes=6))
    assert {index: group.digest() for index, group in one.items()} == {
        index: group.digest() for index, group in all_at_once.items()
    }


def test_a_replay_follows_the_record_without_the_agent(run, settings):
    groups, worker = run(settings)
    broken = with_agent(settings, run="workers_harnesses:play_and_fail", num_retries=0)
    again, _ = run(broken, [(0, decision) for decision in worker.decisions])
    assert {index: group.digest() for index, group in again.items()} == {
        index: group.digest() for index, group in groups.items()
    }


def test_a_step_ends_with_the_causes_if_too_many_episodes_are_discarded(run, settings):
    with pytest.raises(WorkersError, match=r"6 of 6 episodes .*max_discarded=0.5[\s\S]*a bug of the agent"):
        run(with_agent(settings, run="workers_harnesses:play_and_fail", num_retries=0, max_discarded=0.5))
    groups, _ = run(with_agent(settings, run="workers_harnesses:play_and_fail", num_retries=0, max_discarded=1.0))
    assert all(group.is_discarded.all() and not group.loss_mask.any() for group in groups.values())


def test_an_agent_process_that_is_closed_ends_by_itself(make_worker, settings):
    worker = make_worker(AgentRollout, settings)
    worker._host.step = STEP
    worker.weights_received(7)
    list(worker.sample(prompts()))
    worker.close()
    assert worker._agents._process.returncode == 0


def test_a_lost_agent_process_is_reported_with_how_it_ended(make_worker, settings):
    worker = make_worker(AgentRollout, with_agent(settings, run="workers_harnesses:play_two"))
    worker._host.step = STEP
    worker.weights_received(7)
    os.kill(worker._agents.pid, signal.SIGKILL)
    with pytest.raises(ProcessLost, match="ended with status -9"):
        list(worker.sample(prompts()))
    worker.close()


@pytest.mark.parametrize("has_partner", [False, True])
def test_a_step_that_is_abandoned_leaves_nothing_to_the_next_one(make_worker, settings, partner, has_partner):
    worker = make_worker(AgentRollout, with_partner(settings, partner) if has_partner else settings)
    worker._host.step = STEP
    worker.weights_received(7)
    first = worker.sample(prompts())
    next(first)
    first.close()
    worker.abandon()
    groups = [group for whole in worker.sample(prompts()) for group in whole]
    assert sorted(group.index for group in groups) == [0, 1, 2]
    worker.close()
    assert worker._agents._process.returncode == 0, "it ends when the rank closes the connection, without a signal"


def test_a_tool_that_does_not_exist_is_refused_before_an_episode(make_worker, settings):
    worker = make_worker(AgentRollout, with_agent(settings, run="loop", tools=["calculator"]))
    worker._host.step = STEP
    with pytest.raises(SettingsRefused, match="calculator"):
        list(worker.sample(prompts()))
    worker.close()


def test_agents_that_are_parts_of_the_policy_train_or_not_and_are_replayed(run, settings):
    named = with_agent(
        settings,
        run="workers_harnesses:play_both",
        agents={"solver": NamedAgent(), "judge": NamedAgent(trains=False)},
    )
    groups, worker = run(named)
    for group in groups.values():
        assert group.agents == ("solver",) and group.agent_rewards.tolist() == [[1.0], [1.0]]
        assert sorted(group.row_agents.tolist()) == [-1, -1, 0, 0]
        assert group.loss_mask.any(1).tolist() == (group.row_agents == 0).tolist()
        assert group.tokens_by_version().keys() == {7}
    again, _ = run(named, [(0, decision) for decision in worker.decisions])
    assert {index: group.digest() for index, group in again.items()} == {
        index: group.digest() for index, group in groups.items()
    }


def test_an_agent_that_nobody_asks_is_noted(run, settings):
    agents = dict.fromkeys(("solver", "judge", "critc"), NamedAgent())
    _, worker = run(with_agent(settings, run="workers_harnesses:play_both", agents=agents))
    (note,) = worker._host.notes
    assert "no episode has asked the agent 'critc' for a turn" in note


# -- late groups -------------------------------------------------------------------------------------------------------

NUM_STEPS, NUM_PROMPTS = 4, 3


@pytest.fixture
def late_settings(settings):
    sampling = SamplingSettings(group_size=2, max_new_tokens=12)
    settings = replace(settings, train=sampling, evaluate=sampling, max_lateness=1)
    settings = with_agent(settings, max_context_tokens=44, max_new_tokens=12)
    return replace(settings, max_prompt_tokens=settings.agent.max_prompt_tokens)


class ListOfItems(list):
    """A writer that keeps what was put."""

    def put_many(self, items):
        self.extend(group for _, group in items)


def from_start():
    """The late group with which a run begins."""
    late = replace(prompts()[0], index=NUM_PROMPTS, text="78")
    return late_from_start(late, StepContext(step=0, phase="train", seed=STEP.seed, num_items=NUM_PROMPTS), 2)


def late_steps(worker, reader, *, between=lambda worker: None, earlier=()):
    """The groups of each step, and its decisions."""
    worker.go_on_with([[from_start()]])
    outcomes = []
    for step in range(NUM_STEPS):
        worker._host.step = replace(STEP, step=step)
        worker.weights_received(step)
        worker.decisions, written = [], ListOfItems()
        worker.earlier = [(0, one) for one in earlier[step]] if earlier else None
        worker.generate(reader([prompts()]), written)
        assert [group.index for group in written] == list(range(NUM_PROMPTS))
        assert len(worker.late_groups()) == 1
        outcomes.append((written, worker.decisions))
        between(worker)
    return outcomes


def begin_again(worker):
    """Goes on from a checkpoint, without the agents."""
    worker.go_on_with([unpack(pack(worker.late_groups()))])


def content(group):
    return tuple(tuple(row[:length]) for row, length in zip(group.completion_ids.tolist(), group.lengths, strict=True))


def sampled_alone(worker, submitted):
    """Content of the group of each prompt, run alone in the step in which it was submitted."""
    groups = {}
    for step, index in submitted:
        worker._host.step = replace(STEP, step=step)
        worker.weights_received(0)
        prompt = from_start().prompt if index == NUM_PROMPTS else prompts()[index]
        ((group,),) = list(worker.sample([prompt]))
        groups[step, index] = content(group)
    return groups


@pytest.mark.parametrize("between", [lambda worker: None, begin_again], ids=["going on", "begun again"])
def test_episodes_that_outlive_a_step_are_those_of_a_step_that_waits(make_worker, late_settings, reader, between):
    """With equal weights, whose version counts steps. Agents that begin again are answered with the same turns."""
    worker = make_worker(RecordedAgentRollout, late_settings)
    steps = late_steps(worker, reader, between=between)
    worker.close()
    alone = make_worker(AgentRollout, replace(late_settings, max_lateness=0))
    every = {(step, index) for step in range(NUM_STEPS) for index in range(NUM_PROMPTS)} | {(0, NUM_PROMPTS)}
    expected = sampled_alone(alone, every)
    alone.close()
    left, num_mixed = [], 0
    for step, (groups, decisions) in enumerate(steps):
        for group, decision in zip(groups, [one for one in decisions if "group" in one], strict=True):
            submitted = tuple(decision["submitted"])
            left.append(submitted)
            assert content(group) == expected[submitted] and step - submitted[0] in (0, 1)
            versions = group.tokens_by_version()
            assert {str(version): count for version, count in versions.items()} == decision["tokens"]
            assert versions.keys() <= {submitted[0], step}
            num_mixed += len(versions) > 1
    assert len(set(left)) == len(left) == NUM_STEPS * NUM_PROMPTS
    assert num_mixed, "no episode has outlived its step"


def test_a_replay_of_late_episodes_is_the_run_to_the_bit(make_worker, late_settings, reader):
    worker = make_worker(RecordedAgentRollout, late_settings)
    steps = late_steps(worker, reader)
    worker.close()
    broken = make_worker(RecordedAgentRollout, with_agent(late_settings, run="workers_harnesses:play_and_fail"))
    again = late_steps(broken, reader, between=begin_again, earlier=[decisions for _, decisions in steps])
    broken.close()
    for (groups, decisions), (same, decided) in zip(steps, again, strict=True):
        assert [group.digest() for group in groups] == [group.digest() for group in same]
        for kind in ("said", "group"):  # how the two interleave depends on how many messages come at once
            assert [one for one in decisions if kind in one] == [one for one in decided if kind in one]


def test_an_evaluation_does_not_see_late_episodes(make_worker, late_settings, reader):
    evaluated = []

    def evaluate(worker):
        worker._host.step = replace(STEP, phase="evaluate")
        groups = [group for whole in worker.sample(prompts()) for group in whole]
        evaluated.append({group.index: content(group) for group in groups})

    worker = make_worker(RecordedAgentRollout, late_settings)
    late_steps(worker, reader, between=evaluate)
    worker.close()
    assert len(evaluated[0]) == NUM_PROMPTS and all(one == evaluated[0] for one in evaluated)


def with_partner(settings, partner):
    agents = {"solver": NamedAgent(), "judge": NamedAgent(trains=False, folder=partner.folder)}
    return with_agent(settings, run="workers_harnesses:play_both", agents=agents)


def test_a_partner_samples_with_weights_and_words_of_its_own(make_worker, settings, model, partner):
    """Against one forward pass of its model over each history."""
    worker = make_worker(AgentRollout, with_partner(settings, partner))
    worker._host.step = STEP
    worker.weights_received(7)
    queue, served = worker._partners[partner.folder], []
    finished = queue.finished
    queue.finished = lambda: served.extend(ended := finished()) or ended
    groups = [group for whole in worker.sample(prompts()) for group in whole]
    worker.close()
    assert len(served) == len(TEXTS) * SAMPLING.group_size and {one.turn.agent for one, _ in served} == {"judge"}
    loaded, size = load_model(partner), len(load_tokenizer(model.folder))
    for pending, sampled in served:
        history = torch.tensor([*pending.token_ids, *sampled.token_ids])
        with torch.no_grad():
            logprobs = loaded.model(history[None]).logits[0].log_softmax(-1)
        start = len(pending.token_ids)
        own = logprobs[start - 1 : -1].gather(1, history[start:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sampled.logprobs), own, atol=2e-5, rtol=0)
        assert sampled.versions == [(len(sampled.token_ids), -1)] and min(pending.token_ids) >= size
    for group in groups:
        assert group.tokens_by_version().keys() == {7} and group.policy_version == 7
        assert group.loss_mask.any(1).tolist() == (group.row_agents == 0).tolist()
        assert group.completion_ids[group.row_agents == 0].max() < size


def test_a_partner_is_replayed_and_comes_back_from_the_host_unchanged(run, settings, partner):
    groups, worker = run(with_partner(settings, partner))
    digests = {index: group.digest() for index, group in groups.items()}
    again, _ = run(with_partner(settings, partner), [(0, decision) for decision in worker.decisions])
    assert {index: group.digest() for index, group in again.items()} == digests
    worker.offload()
    worker.onload()
    worker.discard()
    worker.onload()
    once_more = {group.index: group.digest() for whole in worker.sample(prompts()) for group in whole}
    assert once_more == digests

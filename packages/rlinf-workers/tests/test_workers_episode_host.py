"""The agent process: episodes that end well and badly, with a scripted rank in place of the engine."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import workers_harnesses
from workers_sessions import LIMITS, Script, characters, plain_template

from rlinf_workers.agents.harness import Harness, import_problem
from rlinf_workers.agents.host import AgentHost, Attempt, longest_wait, yield_to_engine
from rlinf_workers.agents.link import (
    MAX_BYTES,
    AgentTask,
    Answer,
    Ask,
    Begin,
    EpisodeReport,
    Frames,
    frame,
    from_agents,
)
from rlinf_workers.agents.records import EpisodeEnded, Sampled, cut, turns
from rlinf_workers.agents.sessions import AgentSession
from rlinf_workers.agents.settings import EpisodeSettings, NamedAgent

HERE = Path(__file__).parent
END = 1
TASK = AgentTask(
    index=3, member=1, step=5, phase="train", messages=[{"role": "user", "content": "12="}], text="12=", answer="12"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    characters().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])
    return tmp_path


def settings(folder, **changes):
    defaults = {
        "max_turns": 3,
        "max_context_tokens": 60,
        "max_new_tokens": 12,
        "max_episodes": 8,
        "max_idle_s": 30.0,
        "num_retries": 0,
        "tokenizer_folder": str(folder),
        "stop_ids": [END],
    }
    return EpisodeSettings(**(defaults | changes))


class Rank:
    """Answers every request of the host, and collects the reports.

    Args:
        replies: what the policy writes after a number of turns; the last is repeated.
    """

    def __init__(self, replies):
        self.replies, self.asks, self.reports = list(replies), [], asyncio.Queue()
        self.host: Any = None
        self._num_turns = {}

    def send(self, message):
        if isinstance(message, EpisodeReport):
            self.reports.put_nowait(message)
        elif isinstance(message, Ask):
            self.asks.append(message)
            number = self._num_turns[message.episode] = self._num_turns.get(message.episode, -1) + 1
            text = self.replies[min(number, len(self.replies) - 1)]
            ids = [*characters().encode(text).ids, END]
            sampled = Sampled(
                token_ids=ids,
                logprobs=[-0.5] * len(ids),
                versions=[(len(ids), 4)],
                noise=message.noise,
            )
            asyncio.get_running_loop().call_soon(self.host.answer, Answer(request=message.request, sampled=sampled))


def episode(settings, replies=("12",), *, number=1):
    """The report of one episode, and the rank."""

    async def run():
        rank = Rank(replies)
        rank.host = AgentHost(settings, rank.send)
        await rank.host.start()
        rank.host.begin(Begin(episode=number, task=TASK, noise=99))
        try:
            return await asyncio.wait_for(rank.reports.get(), 60), rank
        finally:
            await rank.host.close()

    return asyncio.run(run())


def spelled(trajectory):
    tokenizer = characters()
    return [(node.author, tokenizer.decode(node.token_ids, skip_special_tokens=True)) for node in trajectory.nodes]


def test_the_loop_calls_a_tool_and_goes_on_with_its_result(folder):
    report, rank = episode(settings(folder, tools=["workers_harnesses:echo"]), ["[echo:12]", "12"])
    trajectory = report.trajectory
    assert spelled(trajectory) == [("user", "12="), ("policy", "[echo:12]"), ("tool", "{12}"), ("policy", "12")]
    assert trajectory.reward is None and trajectory.cause == ""
    assert rank.asks[1].token_ids == trajectory.token_ids(2)


def test_an_agent_in_this_process_calls_the_tools_of_the_recipe_and_branches_them(folder):
    report, _ = episode(settings(folder, run="workers_harnesses:branches", tools=["python"]), ["[python:12]", "12"])
    assert spelled(report.trajectory)[2] == ("tool", "{12}") and report.trajectory.reward == 1.0
    assert report.counts["calls"] == 5


def test_what_the_policy_did_not_cause_is_tried_again_with_other_noise(folder):
    report, rank = episode(settings(folder, run="workers_harnesses:raises", num_retries=2), ["1"])
    assert report.num_retries == 2 and report.trajectory.cause == "harness_lost"
    assert "no such thing" in report.trajectory.detail
    assert len({ask.noise for ask in rank.asks}) == 3


def test_a_harness_talks_to_its_session_and_its_prints_rewards_and_result_are_kept(folder):
    report, _ = episode(settings(folder, run="workers_harnesses:answers"), ["3", "4"])
    trajectory = report.trajectory
    assert spelled(trajectory) == [("user", "12="), ("policy", "3"), ("user", "7"), ("policy", "4")]
    assert trajectory.reward == 2.0 and [node.reward for node in turns(trajectory)] == [0.25, None]
    assert trajectory.printed == "begins 12=\nends\n"


def test_hundreds_of_episodes_of_a_harness_that_is_not_async_run_at_once(folder):
    async def run():
        rank = Rank(["1"])
        rank.host = AgentHost(settings(folder, run="workers_harnesses:meets_others", max_episodes=200), rank.send)
        await rank.host.start()
        for number in range(workers_harnesses.NUM_MEETING):
            task = msgspec.structs.replace(TASK, member=number)
            rank.host.begin(Begin(episode=number, task=task, noise=number))
        reports = [await asyncio.wait_for(rank.reports.get(), 60) for _ in range(workers_harnesses.NUM_MEETING)]
        await rank.host.close()
        return reports

    assert {report.trajectory.reward for report in asyncio.run(run())} == {1.0}


def test_a_harness_that_hangs_ends_with_its_agent_process(folder):
    async def run():
        harness = Harness("workers_harnesses:hangs")
        await harness.start()
        template, connection = plain_template(), harness._connection
        session = AgentSession("s", template, Script(template, []), LIMITS)
        assert connection is not None
        waiting = asyncio.ensure_future(harness.run("s", "http://x", "key", {}, session))
        await asyncio.sleep(0.2)
        connection._writer.close()  # as the kernel does for a process that was killed
        await asyncio.wait_for(connection._process.wait(), 30)
        with pytest.raises(EpisodeEnded, match="ended with status 0"):
            await waiting

    asyncio.run(run())


def test_a_program_that_reads_env_vars_is_an_agent(folder):
    trajectory = episode(settings(folder, run="workers_harnesses:runs_a_program"), ["5"])[0].trajectory
    assert spelled(trajectory)[-1] == ("policy", "5") and trajectory.reward == 1.0


def test_a_harness_without_a_reward_leaves_the_scoring_to_the_rule(folder):
    assert episode(settings(folder, run="workers_harnesses:leaves_it_to_the_rule"))[0].trajectory.reward is None


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("workers_harnesses:raises", ""),
        ("workers_harneses:raises", "there is no module 'workers_harneses'"),
        ("own_module:wether", "has no 'wether'; did you mean 'weather'?"),
        ("own_modul:weather", "there is no module 'own_modul' in the present folder"),
        ("own_module:NUMBER", "is a int and no function"),
        ("own_module.py:weather", "there is no module 'own_module.py'"),
        ("raising:run", "ZeroDivisionError"),
        ("missing:run", "No module named 'absent_package'"),
        ("exiting:run", "SystemExit: 5"),
        ("dying:run", "ended the process"),
    ],
)
def test_what_is_wrong_with_an_import_path(folder, monkeypatch, path, problem):
    modules = {
        "own_module": "NUMBER = 3\ndef weather(): ...",
        "raising": "print('1')\n1 / 0",
        "dying": "import os; os._exit(9)",
    }
    modules |= {"missing": "import absent_package", "exiting": "raise SystemExit(5)"}
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    reason = import_problem(path)
    assert problem in reason and bool(problem) == bool(reason)
    assert "there is no interpreter /absent/python" in import_problem(path, "/absent/python")


def test_a_module_of_a_user_may_have_the_name_of_one_of_ours(tmp_path, monkeypatch):
    (tmp_path / "harness.py").write_text("async def play(base_url, task, *, session): ...")
    monkeypatch.chdir(tmp_path)
    assert import_problem("harness:play") == ""


def test_an_agent_without_a_session_of_its_own_is_told_from_a_harness(folder):
    assert import_problem("workers_harnesses:branches", first="session") == ""
    assert "over HTTP" in import_problem("workers_harnesses:raises", first="session")


def test_a_harness_that_cannot_be_imported_is_refused_before_any_episode(folder):
    with pytest.raises(EpisodeEnded, match="no_such_module"):
        episode(settings(folder, run="no_such_module:run"))


def test_the_noise_of_a_turn_follows_from_what_it_follows(folder):
    """Two episodes with other numbers, in another process: only the task and what was read decide."""
    one = episode(settings(folder, run="workers_harnesses:play_two"), ["3", "4"], number=1)[1].asks
    other = episode(settings(folder, run="workers_harnesses:play_two"), ["3", "4"], number=7)[1].asks
    changed = episode(settings(folder, run="workers_harnesses:play_two"), ["2", "4"])[1].asks
    assert [ask.noise for ask in one] == [ask.noise for ask in other]
    assert [a.noise == b.noise for a, b in zip(one, changed, strict=True)] == [True, False]


def test_a_turn_that_is_cut_keeps_the_versions_of_its_tokens():
    sampled = Sampled(token_ids=[1, 2, 3, 4], logprobs=[-1.0, -2.0, -3.0, -4.0], versions=[(3, 7), (1, 8)])
    assert cut(sampled, 2, truncated=True).versions == [(2, 7)]
    assert cut(sampled, 4, truncated=True) is sampled


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_messages_are_found_however_the_stream_arrives(size):
    messages = [Ask(request=n, episode=2, token_ids=[7] * n, noise=n) for n in (1, 0, 300)]
    stream = b"".join(map(frame, messages))
    frames = Frames()
    bodies = [body for at in range(0, len(stream), size) for body in frames.feed(stream[at : at + size])]
    assert [from_agents(body) for body in bodies] == messages


def test_a_message_without_bounds_is_refused():
    with pytest.raises(ValueError, match="at most"):
        Frames().feed((MAX_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this policy")
def test_agents_that_wake_do_not_interrupt_the_engine():
    before = os.sched_getscheduler(0)
    try:
        yield_to_engine()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


def test_the_longest_wait_is_named_with_its_session_turn_and_tool(folder):
    async def run():
        rank = Rank(["[slow:1]"])
        rank.host = AgentHost(settings(folder, tools=["workers_harnesses:slow"]), rank.send)
        await rank.host.start()
        rank.host.begin(Begin(episode=1, task=TASK, noise=99))
        while not (text := longest_wait(rank.host._attempts.values())):
            await asyncio.sleep(0.05)
        await rank.host.close()
        return text

    text = asyncio.run(run())
    assert text.startswith("session train-5-3-1-0, after turn 1: tool slow for ")


TWO = {"solver": NamedAgent(), "judge": NamedAgent(trains=False)}


def test_a_harness_names_agents_as_models_and_rewards_each(folder):
    report, rank = episode(settings(folder, run="workers_harnesses:two_players", agents=TWO), ["3", "4"])
    trajectory = report.trajectory
    assert [(node.agent, node.reward) for node in turns(trajectory)] == [("solver", None), ("judge", 0.25)]
    assert trajectory.rewards == {"solver": 0.5, "judge": -1.0} and trajectory.reward is None
    assert [ask.agent for ask in rank.asks] == ["solver", "judge"]


def test_a_reward_for_an_agent_that_does_not_exist_is_the_fault_of_the_harness(folder):
    report, _ = episode(settings(folder, run="workers_harnesses:rewards_a_stranger", agents=TWO))
    assert report.trajectory.cause == "harness_lost"
    assert "'stranger' is none of this job's agents, solver, judge" in report.trajectory.detail


def test_the_noise_of_an_agent_does_not_depend_on_when_others_speak(folder):
    """Two agents after the same tokens, in both orders."""
    asks = episode(settings(folder, run="workers_harnesses:play_both", agents=TWO), ["3", "4"])[1].asks
    first = {ask.agent: ask.noise for ask in asks[:2]}
    assert asks[0].token_ids == asks[1].token_ids and first["solver"] != first["judge"]
    alone = episode(settings(folder, run="workers_harnesses:play_two"), ["3", "4"])[1].asks
    assert alone[0].token_ids == asks[0].token_ids and alone[0].noise not in first.values()
    attempt = Attempt(1, "s", 7)
    late = attempt.noise_of("judge").next([1, 2], None)
    assert late == Attempt(1, "s", 7).noise_of("judge").next([1, 2], None)
    other = Attempt(1, "s", 7)
    other.noise_of("solver").next([1, 2], None)
    assert other.noise_of("judge").next([1, 2], None) == late

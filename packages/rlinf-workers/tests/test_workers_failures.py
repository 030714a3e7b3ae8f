"""What ends an episode, or fails in it, is put down to whoever caused it: agent process, harness process, sandbox, HTTP
server and MCP server are real, and the policy is scripted.

Each row of a table is a group of four episodes. In one of them something fails; the other three answer right, wrong and
right. The row says how that episode ends, so that the statistics of its group follow by hand.
"""

import functools
import json
import math
import string
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from workers_failures import FAILING_MEMBER, URL
from workers_sessions import characters

from rlinf_algos import preset
from rlinf_workers.agents.records import NOT_OF_POLICY, Cause
from rlinf_workers.agents.settings import EpisodeSettings
from rlinf_workers.engines.base import Completions
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.metrics import merge
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.roles.language.advantages import AdvantageMaker
from rlinf_workers.roles.language.agent_rollout import AgentRollout
from rlinf_workers.roles.language.reward import CAUSES, Reward, RewardSettings
from rlinf_workers.roles.language.rollout import RolloutSettings
from rlinf_workers.roles.records.language import Prompt, ScoredGroup
from rlinf_workers.worker import StepContext

pytest.importorskip("mcp")
END = 1
tokenizer = functools.cache(functools.partial(characters, string.printable))
RIGHT, WRONG = "12", "3"
OTHERS = {0: RIGHT, 2: WRONG, 3: RIGHT}
"""Member of a group -> its only turn."""
GROUP_SIZE = 1 + len(OTHERS)
STEP = StepContext(step=2, phase="train", seed=5, num_items=1)
SAMPLING = SamplingSettings(group_size=GROUP_SIZE, max_new_tokens=40)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A group, and what fails in its episode FAILING_MEMBER."""

    name: str
    """Also the text of the task, which says to harnesses and agents how to fail."""
    turns: tuple[str, ...] = (RIGHT,)
    """What the policy writes in that episode; the last is repeated."""
    again: tuple[str, ...] | None = None
    """The same in its second attempt; None: the same."""
    cause: Cause = ""
    reward: float | None = 1.0
    """None: the episode is discarded."""
    num_retries: int = 0
    says: str = ""
    """Part of the detail, or of what the policy or the harness's reader reads."""
    alone: bool = False
    """What fails would disturb other groups, so it fails when they have ended."""
    among_others: bool = False
    """It fails while the rest of its group is under way, which is lost with it and repeated."""


def discarded(name: str, cause: Cause, says: str, *turns: str, alone: bool = False) -> Case:
    """Repeated once, and then left out of its group."""
    return Case(name=name, turns=turns or (RIGHT,), cause=cause, reward=None, num_retries=1, says=says, alone=alone)


LOOP = (
    discarded("tool raises", "tool_service", "a mistake of the tool", "[fail:raise]"),
    discarded("tool hangs", "tool_service", "fail did not answer within 0.4 s", "[fail:hang]"),
    discarded("tool blocks", "tool_service", "block did not answer within 0.4 s", "[block:x]"),
    discarded("tool exits", "tool_service", "SystemExit", "[fail:exit]"),
    discarded("tool cancels itself", "tool_service", "fail cancelled itself", "[fail:cancel]"),
    discarded("tool returns an object", "tool_service", "TypeError", "[fail:garbage]"),
    discarded("tool is unavailable", "tool_service", "the database is gone", "[fail:lost]"),
    discarded("service answers 500", "tool_service", "HTTP Error 500", "[ask:500]"),
    discarded("service answers nonsense", "tool_service", "JSONDecodeError", "[ask:garbage]"),
    discarded("service hangs", "tool_service", "ask did not answer within 1 s", "[ask:hang]"),
    discarded("service hangs up", "tool_service", "in ask", "[ask:cut]"),
    discarded("service is down", "tool_service", "URLError", "[ask:down]"),
    discarded("sandbox does not start", "tool_service", "no more processes", "[starve:2]", "[python:1]", alone=True),
    discarded("sandbox is killed", "tool_service", "sandbox", "[strike:2]", "[python:while 1: 0]", alone=True),
    Case(name="mcp server dies", turns=("[misbehave:exit]",), again=(RIGHT,), num_retries=1, alone=True),
    discarded("mcp server hangs", "tool_service", "misbehave of the MCP server", "[misbehave:hang]"),
    discarded("mcp server crashes", "tool_service", "Error executing tool", "[misbehave:crash]"),
    Case(name="service fails once", turns=("[ask:flaky]", RIGHT), says="{fine}"),
    Case(name="service fails for a while", turns=("[ask:500]",), again=(RIGHT,), num_retries=1),
    Case(
        name="sandbox is lost between calls",
        turns=("[python:x=5]", "[strike:0]", "[python:x]", RIGHT),
        says="{5",
        alone=True,
    ),
    Case(
        name="program needs too much memory",
        turns=("[python:y=[bytearray(10**6) for i in range(300)]]", WRONG),
        reward=0.0,
        says="memory",
    ),
    Case(name="program never ends", turns=("[python:while 1: 0]", WRONG), reward=0.0, says="took longer than"),
    Case(name="program ends its process", turns=("[python:import os; os.abort()]", RIGHT), says="are lost"),
    Case(name="program raises", turns=("[python:1+{}]", RIGHT), says="unsupported operand"),
    Case(name="tool refuses", turns=("[fail:refuse]", RIGHT), says="{There is no such row.}"),
    Case(name="mcp server refuses", turns=("[misbehave:anticipated]", RIGHT), says="no such row"),
    Case(name="there is no such tool", turns=("[fale:x]", RIGHT), says="did you mean"),
    Case(name="call is malformed", turns=("[fail:x", RIGHT), says="could not be read"),
    Case(name="no turn is left", turns=("[fail:x]",), cause="turns", reward=0.0, says="all 4 turns"),
    Case(name="no room is left", turns=("[python:900*[1]]",), cause="tokens", reward=0.0, says="at most 1000 fit"),
)
HARNESS = (
    Case(name="harness is killed among others", num_retries=1, among_others=True),
    discarded("harness raises", "harness_lost", "mistake of the harness'\nIt printed:\nbefore the mistake"),
    Case(name="harness raises once", num_retries=1),
    discarded("harness is killed", "harness_lost", "ended with status -9", alone=True),
    discarded("harness exits", "harness_lost", "SystemExit: 3"),
    discarded("harness exits in a thread", "harness_lost", "SystemExit: 3"),
    Case(name="harness hangs", cause="time", says="more than 3 s outside the engine"),
    Case(name="harness hangs in a thread", turns=(WRONG,), cause="time", reward=0.0, says="more than 3 s"),
    discarded("harness returns a text", "harness_lost", "could not convert string to float"),
    discarded("harness returns nan", "harness_lost", "nan is not a finite number"),
    discarded("harness rewards with nan", "harness_lost", "nan is not a finite number"),
    discarded("harness rewards another turn", "harness_lost", "there is no turn 5 to reward"),
    discarded("harness has another key", "harness_lost", "HTTP Error 401"),
    discarded("harness asks nonsense", "harness_lost", "HTTP Error 400"),
    discarded("harness meets a fault", "service", "a fault of the server"),
    Case(name="harness asks without end", cause="turns", says="all 4 turns"),
    Case(name="harness ignores the end", cause="turns", reward=0.5, says="all 4 turns"),
    discarded("harness asks for nothing", "harness_lost", "did not ask the policy for a turn"),
    Case(name="harness prints a lot"),
)
AGENT = (
    discarded("agent raises", "harness_lost", "a mistake of the agent"),
    discarded("agent exits", "harness_lost", "SystemExit: 3"),
    discarded("agent returns nan", "harness_lost", "nan is not a finite number"),
    discarded("agent rewards with nan", "harness_lost", "nan is not a finite number"),
    discarded("agent asks nonsense", "harness_lost", "messages is empty"),
    Case(name="agent hangs", cause="time", says="more than 3 s outside the engine"),
    Case(name="agent asks without end", turns=(RIGHT, WRONG), cause="turns", reward=0.0, says="all 4 turns"),
)


# -- the scripted policy -----------------------------------------------------------------------------------------------


class ScriptedEngine:
    """Writes a turn at once. `reply` maps the number of a request and its tokens to the turn; None: not yet."""

    num_steps = 0

    def __init__(self, model, device, *, max_prompt_tokens, max_batch_sequences):
        self.reply: Callable[[int, list[int]], str | None] = lambda request, token_ids: RIGHT
        self.is_lost = False
        self._open = []

    def free_capacity(self, group_size):
        return 1000

    def submit(self, prompts, sampling, *, seed, step):
        raise AssertionError("episodes submit turns")

    def submit_unfinished(self, unfinished, sampling):
        self._open += [one.prompt for one in unfinished]

    def finished(self):
        if self.is_lost:
            raise RuntimeError("the device is lost")
        time.sleep(0.002)
        replies = [(prompt, self.reply(prompt.index, prompt.token_ids.tolist())) for prompt in self._open]
        self._open = [prompt for prompt, text in replies if text is None]
        return [_completion(prompt.index, text) for prompt, text in replies if text is not None]

    def interrupt(self, at_step=0):
        pass

    def pause(self, on_new_weights):
        return []

    def resume(self):
        pass

    def suspend(self):
        return []

    def abandon(self):
        self._open.clear()

    def weights_received(self, policy_version):
        pass

    def close(self):
        pass


def _completion(index, text):
    ids = [*tokenizer().encode(text).ids, END]
    return Completions(
        index=index,
        members=(0,),
        token_ids=torch.tensor([ids]),
        loss_mask=torch.ones(1, len(ids)),
        logprobs=torch.full((1, len(ids)), -0.5),
        truncated=torch.tensor([False]),
        policy_version=7,
    )


class Script:
    """The policy in all groups of a table."""

    def __init__(self, worker, cases):
        self._worker, self._cases = worker, cases
        self._attempts: Counter[tuple[int, int]] = Counter()
        self._started: dict[int, int] = {}
        """Number of a request that begins an attempt -> which attempt of its episode."""

    def __call__(self, request, token_ids):
        episode = self._worker._policy._running[request].episode
        if episode.report is not None:
            return RIGHT  # of an attempt that was lost
        index, member = episode.index, episode.member
        case, num_turns = self._cases[index], token_ids.count(END)
        if not num_turns and request not in self._started:
            self._attempts[index, member] += 1
            self._started[request] = self._attempts[index, member]
        if (case.alone or case.among_others) and not self._is_next(index, member, case):
            return None
        if member != FAILING_MEMBER:
            return OTHERS[member]
        is_again = case.again is not None and self._attempts[index, member] > 1
        turns = case.again if is_again and case.again else case.turns
        return turns[min(num_turns, len(turns) - 1)]

    def _is_next(self, index, member, case):
        """Whether this episode may go on: all groups but those that fail alone have ended, and so have the earlier of
        those."""
        if member != FAILING_MEMBER:
            return not case.among_others or self._attempts[index, FAILING_MEMBER] > 1
        waiting = {
            one.index
            for one in self._worker._episodes.values()
            if one.member == FAILING_MEMBER or not self._cases[one.index].among_others
        }
        return all(self._cases[one].alone or self._cases[one].among_others for one in waiting) and index == min(waiting)


# -- the runs ----------------------------------------------------------------------------------------------------------


class ReportingRollout(AgentRollout):
    """Keeps the reports of its episodes."""

    def __init__(self, settings):
        super().__init__(settings)
        self.reports = {}

    def _ended(self, groups, episode, report):
        self.reports[episode.index, episode.member] = report
        return super()._ended(groups, episode, report)


class Service(BaseHTTPRequestHandler):
    """Fails as the path says."""

    num_asked: ClassVar[Counter[str]] = Counter()

    def do_GET(self):
        path = self.path.strip("/")
        self.num_asked[path] += 1
        if path == "hang":
            time.sleep(3.0)
        if path == "500" or (path == "flaky" and self.num_asked[path] == 1):
            self.send_error(500)
            return
        body = b"<html>" if path == "garbage" else json.dumps({"value": "fine"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + 100 * (path == "cut")))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's folder as far as agents and rewards read it."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("characters")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": END}))
    return str(folder)


@pytest.fixture(scope="module")
def service():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(URL, f"http://127.0.0.1:{server.server_port}/")
        yield
    server.shutdown()


def settings_of(folder, **changes):
    agent = EpisodeSettings(
        **{
            "max_turns": 4,
            "max_context_tokens": 1000,
            "max_new_tokens": SAMPLING.max_new_tokens,
            "max_episodes": 1000,
            "max_idle_s": 3.0,
            "max_discarded": 1.0,
            "tokenizer_folder": folder,
            **changes,
        }
    )
    return RolloutSettings(
        model=ModelSettings(folder=folder, has_weights=False),
        train=SAMPLING,
        evaluate=SAMPLING,
        max_prompt_tokens=agent.max_prompt_tokens,
        engine=f"{__name__}:{ScriptedEngine.__name__}",
        agent=agent,
    )


LOOP_SETTINGS = {
    "run": "loop",
    "max_idle_s": 120.0,
    "tools": [
        {"tool": "workers_failures:fail", "time_limit_s": 0.4},
        {"tool": "workers_failures:block", "time_limit_s": 0.4},
        {"tool": "workers_failures:ask", "time_limit_s": 1.0},
        "workers_failures:strike",
        "workers_failures:starve",
        {"tool": "python", "time_limit_s": 6.0, "memory_bytes": 128 << 20, "allow_weak_isolation": True},
        {
            "tool": "mcp",
            "command": [sys.executable, str(Path(__file__).with_name("workers_mcp_server.py"))],
            "functions": ["misbehave"],
            "time_limit_s": 1.0,
        },
    ],
}


@dataclass(frozen=True)
class Played:
    """What became of a table's groups."""

    scored: dict[str, ScoredGroup]
    reports: dict[str, list]
    metrics: dict[str, float]


@contextmanager
def worker_of(worker_class, *arguments):
    identity = Identity(role="worker", rank=0, num_ranks=1, devices=("cpu:0",), rendezvous="")
    host = WorkerHost(identity, lambda *_, **__: Future())
    host.step = STEP
    worker = host.make(worker_class, *arguments)
    try:
        yield worker
    finally:
        worker.close()


def prompts_of(names):
    nothing = torch.zeros(1, dtype=torch.int64)
    return [
        Prompt(index=index, token_ids=nothing, reference_answer=RIGHT, text=name) for index, name in enumerate(names)
    ]


def play(folder, cases, **changes) -> Played:
    with (
        worker_of(ReportingRollout, settings_of(folder, **changes)) as rollout,
        worker_of(Reward, RewardSettings(rule="exact_match", tokenizer_folder=folder)) as reward,
    ):
        rollout.weights_received(7)
        rollout._engine.reply = Script(rollout, cases)
        groups = [group for whole in rollout.sample(prompts_of([case.name for case in cases])) for group in whole]
        groups.sort(key=lambda group: group.index)
        scored = reward.score_groups(groups)
        metrics = merge([rollout._host.metrics.drain(), reward._host.metrics.drain()])
        names = [case.name for case in cases]
        reports = {
            name: [rollout.reports[index, member] for member in range(GROUP_SIZE)] for index, name in enumerate(names)
        }
        return Played(dict(zip(names, scored, strict=True)), reports, metrics)


TABLES = {
    "loop": (LOOP, LOOP_SETTINGS),
    "harness": (HARNESS, {"run": "workers_failures:harness"}),
    "agent": (AGENT, {"run": "workers_failures:agent"}),
}


@pytest.fixture(scope="module")
def played(folder, service) -> Callable[[str], Played]:
    """Plays all groups of a table at once."""
    results = {}

    def of(table):
        if table not in results:
            cases, changes = TABLES[table]
            results[table] = play(folder, cases, **changes)
        return results[table]

    return of


def rows():
    return [pytest.param(table, case, id=case.name) for table, (cases, _) in TABLES.items() for case in cases]


@pytest.mark.parametrize(("table", "case"), rows())
def test_a_failure_is_put_down_to_whoever_caused_it(played, table, case):
    group, reports = played(table).scored[case.name], played(table).reports[case.name]
    own = reports[FAILING_MEMBER]
    reported = own.trajectory.detail + "".join(
        tokenizer().decode(node.token_ids) for node in own.trajectory.nodes if node.author == "tool"
    )
    assert (own.trajectory.cause, own.num_retries) == (case.cause, case.num_retries), reported
    assert case.says.lower() in reported.lower()
    for member in OTHERS:
        retries = case.num_retries if case.among_others else 0
        assert (reports[member].trajectory.cause, reports[member].num_retries) == ("", retries)
    rewards = [1.0, math.nan if case.reward is None else case.reward, 0.0, 1.0]
    torch.testing.assert_close(group.rewards, torch.tensor(rewards), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(("table", "case"), rows())
def test_a_group_is_compared_without_what_was_discarded(played, table, case):
    group = played(table).scored[case.name]
    counted = [1.0, 0.0, 1.0] if case.reward is None else [1.0, case.reward, 0.0, 1.0]
    mean = sum(counted) / len(counted)
    std = math.sqrt(sum((one - mean) ** 2 for one in counted) / (len(counted) - 1))
    advantages = [(one - mean) / (std + 1e-4) for one in counted]
    if case.reward is None:
        advantages.insert(FAILING_MEMBER, 0.0)
    (learned,) = AdvantageMaker(preset("grpo"), max_completion_tokens=1000).make([group])
    torch.testing.assert_close(
        learned.samples.by_episode(learned.advantages)
        / learned.samples.by_episode(torch.ones(len(learned.advantages))),
        torch.tensor(advantages),
        rtol=1e-5,
        atol=1e-6,
    )
    has_loss = group.samples.by_episode(group.samples.loss_mask.sum(-1)) > 0
    assert has_loss.tolist() == [True, case.reward is not None, True, True]


@pytest.mark.parametrize("table", TABLES)
def test_metrics_count_causes_and_repeated_episodes(played, table):
    cases, metrics = TABLES[table][0], played(table).metrics
    num_episodes = GROUP_SIZE * len(cases)
    for cause in CAUSES:
        name = f"agent/{'discarded' if cause in NOT_OF_POLICY else 'ended'}/{cause}"
        assert metrics[name] == pytest.approx(sum(case.cause == cause for case in cases) / num_episodes)
    num_retries = sum(case.num_retries * (GROUP_SIZE if case.among_others else 1) for case in cases)
    assert metrics["agent/retries"] == pytest.approx(num_retries / num_episodes)
    means = [(2.0 + (case.reward or 0.0)) / (3 if case.reward is None else 4) for case in cases]
    assert metrics["reward/mean"] == pytest.approx(sum(means) / len(means))


def test_what_a_harness_prints_is_kept_to_a_length(played):
    printed = played("harness").reports["harness prints a lot"][FAILING_MEMBER].trajectory.printed
    assert set(printed) == {"x", "\n"} and len(printed) == 20_000


def test_a_lost_engine_costs_the_step_and_no_number(folder):
    """No episode ends by it: the step is repeated, with the same noise."""
    prompts = prompts_of(["first", "second"])
    with worker_of(ReportingRollout, settings_of(folder, run="workers_failures:agent")) as rollout:
        rollout.weights_received(7)
        rollout._engine.is_lost = True
        with pytest.raises(RuntimeError, match="the device is lost"):
            list(rollout.sample(prompts))
        assert not rollout.reports
        rollout.abandon()
        rollout._engine.is_lost = False
        repeated = [group.digest() for whole in rollout.sample(prompts) for group in whole]
    with worker_of(ReportingRollout, settings_of(folder, run="workers_failures:agent")) as rollout:
        rollout.weights_received(7)
        assert sorted(group.digest() for whole in rollout.sample(prompts) for group in whole) == sorted(repeated)

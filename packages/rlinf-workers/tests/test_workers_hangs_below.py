"""Real hangs in the processes that workers start (an engine's, simulators, checkers of rewards): each is named."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from workers_hangs import FOUND_S, Taker, explained, running

from rlinf_algos.rewards import awaited_processes
from rlinf_algos.rewards.process_pool import ProcessPool
from rlinf_envs import EnvSpec
from rlinf_workers import Executor, Flow, Reader, Worker, Writer
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.explaining.text import explanation_text
from rlinf_workers.roles.embodied.environment import Environment, EnvironmentSettings
from rlinf_workers.roles.language.reward import Reward, RewardSettings
from rlinf_workers.roles.language.rollout import Rollout, RolloutSettings
from rlinf_workers.roles.records.embodied import Action, GroupObservation
from rlinf_workers.roles.records.language import Prompt, SampleGroup

HERE = Path(__file__).stem
"""As the processes of workers import it."""
ONE_SAMPLE = SamplingSettings(group_size=1, max_new_tokens=1)
PROMPTS = [Prompt(index=i, token_ids=torch.tensor([2, 3]), reference_answer="3") for i in range(2)]
ENDLESS_CHECK = """
import time

def check(*texts):
    time.sleep(3600)
"""


class SilentEngine:
    """Generates in a process of its own, which never answers."""

    def __init__(self, model, device, *, max_prompt_tokens, max_batch_sequences=None):
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(3600)"], stdout=subprocess.PIPE
        )
        self._room = 1

    def process_ids(self) -> Sequence[int]:
        return [self._process.pid]

    def open_receiver(self, ports):
        raise NotImplementedError

    def free_capacity(self, group_size):
        return self._room

    def submit(self, prompts, sampling, *, seed, step):
        self._room = 0

    def finished(self):
        assert self._process.stdout is not None
        self._process.stdout.read()
        raise AssertionError("it has answered")

    def close(self):
        self._process.kill()


class Sampler(Worker):
    """Stands in for a rollout."""

    def sample(self, prompts: Reader[Prompt], samples: Writer[SampleGroup]) -> None:
        for chunk in prompts:
            for prompt in chunk:
                ones = torch.ones(1, 1)
                group = SampleGroup(
                    prompt=prompt,
                    completion_ids=ones.long(),
                    loss_mask=ones,
                    rollout_logprobs=-ones,
                    policy_version=0,
                    truncated=torch.tensor([False]),
                )
                samples.put(group, key=prompt.index)


class Policy(Worker):
    """Acts without looking."""

    def act(self, observations: Reader[GroupObservation], actions: Writer[Action]) -> None:
        for chunk in observations:
            for one in chunk:
                answer = Action(group=one.group, time=one.time, actions=torch.zeros(2, 1, 1, dtype=torch.int64))
                actions.put(answer, key=one.group)


def pooled(completion: str, answer: str) -> float:
    """A reward that asks a pool of processes."""
    checker = Path(os.environ["TMPDIR"]) / "endless.py"
    checker.write_text(ENDLESS_CHECK)
    with ProcessPool(checker, num_processes=1, time_limit_s=3600, wall_limit_s=3600) as pool:
        return float(pool.run([(completion, answer)])[0][0] == "right")


def named(executor: Executor, root_cause: str) -> tuple[int, str]:
    """The number of the only process of that kind that is waited for, and what is said of it."""
    deadline = time.monotonic() + FOUND_S
    while not (processes := [one for one in executor.snapshot().processes if one.name.startswith(root_cause)]):
        assert time.monotonic() < deadline, executor.snapshot()
        time.sleep(0.1)
    return processes[0].pid, processes[0].name


def test_an_engine_that_stops_answering(tmp_path, model):
    settings = RolloutSettings(
        model=model, train=ONE_SAMPLE, evaluate=ONE_SAMPLE, max_prompt_tokens=None, engine=f"{HERE}:SilentEngine"
    )
    flow = Flow("hangs").worker("rollout", Rollout, settings).worker("taker", Taker)
    flow.stage("rollout", Rollout.generate, reads="prompts", writes="samples")
    flow.stage("taker", Taker.take, reads="samples")
    with running(tmp_path, flow, items=PROMPTS, num_ranks={"rollout": 1}) as executor:
        pid, name = named(executor, "rollout/0 engine ")
        explanation = explained(executor, name)
    wait = explanation.nodes["rollout/0 rollout"].wait
    assert wait is not None and wait.kind == "engine"
    text = explanation_text(explanation)
    assert f"\nroot cause: rollout/0 engine {pid} waits for nobody and stands still: sleeping" in text
    assert "  rollout/0 rollout waits for its engine since " in text
    assert f"\nrollout/0 engine {pid} (process {pid}): sleeping" in text


@pytest.mark.slow
def test_a_simulator_that_was_stopped(tmp_path):
    settings = EnvironmentSettings(
        spec=EnvSpec(kind="gymnasium", id="CartPole-v1", num_envs=2, num_processes=2),
        num_groups=1,
        num_steps=10**9,
        reads=("state",),
        num_eval_episodes=0,
        eval_seed=0,
    )
    flow = Flow("hangs").worker("env", Environment, settings).worker("policy", Policy)
    flow.stage("env", Environment.interact, reads="actions", writes="observations")
    flow.stage("policy", Policy.act, reads="observations", writes="actions")
    with running(tmp_path, flow, num_ranks={"env": 1, "policy": 1}) as executor:
        pid, name = named(executor, "env/0 simulator ")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)  # the other one answers, and a beat says so
        explanation = explained(executor, name, cause="stopped")
        os.kill(pid, signal.SIGCONT)
    assert explanation.nodes["env/0 env"].whose_move == (name,)
    text = explanation_text(explanation)
    assert f"root cause: env/0 simulator {pid} is stopped; 2 others wait for it" in text
    assert f"kill -CONT {pid}" in text


@pytest.mark.slow
def test_a_checker_of_a_reward_that_does_not_end(tmp_path, model, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    settings = RewardSettings(rule=f"{HERE}:pooled", tokenizer_folder=model.folder)
    flow = Flow("hangs").worker("sampler", Sampler).worker("reward", Reward, settings).worker("taker", Taker)
    flow.stage("sampler", Sampler.sample, reads="prompts", writes="samples", needs_device=False)
    flow.stage("reward", Reward.score, reads="samples", writes="scored", needs_device=False)
    flow.stage("taker", Taker.take, reads="scored", needs_device=False)
    with running(tmp_path, flow, items=PROMPTS) as executor:
        pid, name = named(executor, "reward/0 checker ")
        explanation = explained(executor, name)
    assert explanation.nodes["taker/0 taker"].whose_move == ("reward/0 reward",)
    assert f"root cause: reward/0 checker {pid} waits for nobody and stands still" in explanation_text(explanation)


def test_checkers_without_items_are_not_waited_for(tmp_path):
    checker = tmp_path / "quick.py"
    checker.write_text("def check(*texts):\n    return ['right', None]\n")
    with ProcessPool(checker, num_processes=1) as pool:
        pool.run([("a", "b")])
        assert pool.process_ids and not set(pool.process_ids) & set(awaited_processes())

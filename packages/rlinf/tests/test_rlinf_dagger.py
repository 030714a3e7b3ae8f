"""DAgger in recipes: what a config needs, which environments and policies go with it, what is counted beforehand."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlinf import jobs
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.embodied.flow import training_flow
from rlinf.jobs.embodied.planning import embodied_notes, embodied_problem
from rlinf.machine import Machine
from rlinf_algos import DaggerAlgorithm

DAGGER = "--algorithm.name dagger --algorithm.expert_share 1"
EXPERT = f"{DAGGER} --env.kind import --env.id {__name__}:Line"


class Line(gym.Env):
    """A number that moves to 0, with an expert."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    observation_space = gym.spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 1)
        return self.place.astype(np.float32), {}

    def step(self, action):
        self.place = np.clip(self.place + 0.1 * action, -2, 2)
        return self.place.astype(np.float32), float(-abs(self.place[0])), False, False, {}

    def expert_actions(self, num_actions):
        return np.stack([-np.sign(self.place)] * num_actions)


def load(line: str) -> Any:
    return load_config("env-ppo", parse_overrides(line.split()))


def refusal(line: str) -> str:
    with pytest.raises(UserError) as caught:
        jobs.prepare(load(line))
    return f"{caught.value}\n{caught.value.hint}"


def test_a_name_chooses_the_record_and_a_resolved_config_is_read_back(tmp_path):
    config = load(f"{DAGGER} --algorithm.query_rate 0.5")
    assert config.algorithm == DaggerAlgorithm(expert_share=1.0, query_rate=0.5)
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(str(tmp_path / "resolved.yaml")) == config
    assert training_flow(config, on_host=False).workers["actor"].worker_class.__name__ == "DaggerActor"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"{DAGGER} --algorithm.gamma 0.9", "--algorithm.gamma is not a key"),
        (f"{DAGGER} --algorithm.expert_share 2", "--algorithm.expert_share=2.0 must be between 0 and 1"),
        (
            f"{DAGGER} --algorithm.batch_size 63 --actor.num_shards 2",
            "batch_size=63 is not a multiple of actor.num_shards=2",
        ),
        (f"{DAGGER} --algorithm.max_staleness 9", "max_staleness=9 must be between 0 and 8"),
        (f"{DAGGER} --env.episodes_per_step 8", "env.episodes_per_step=8 is not used: algorithm.name=dagger asks"),
        (
            f"{DAGGER} --env.kind metaworld --env.id reach-v3 --demonstrations.source experts",
            "demonstrations is not used: algorithm.name=dagger imitates, and needs no rewards; give it as sft_warm_up",
        ),
        ("--algorithm.name dagger", "give demonstrations (--sft_warm_up.source), let the expert act first"),
        (f"{DAGGER} --sft_warm_up.source experts", "source=experts goes with env.kind=metaworld"),
    ],
)
def test_what_a_config_refuses(line, says):
    with pytest.raises(UserError) as caught:
        load(line)
    assert says in str(caught.value)


def test_an_environment_without_an_expert_is_refused_with_those_that_have_one():
    text = refusal(DAGGER)
    assert "env.kind=gymnasium, env.id='CartPole-v1' has none that answers; metaworld has" in text
    assert "a custom environment has one if it defines expert_actions" in text


def test_a_policy_without_a_supervised_loss_is_refused():
    assert "policy.name=soft_actor has no supervised loss" in refusal(f"{EXPERT} --policy.name soft_actor")


def test_a_budget_that_leaves_a_group_with_nothing_is_refused():
    line = f"{EXPERT} --policy.chunk_size 2 --algorithm.max_expert_actions"
    text = refusal(f"{line} 3")
    assert "=3 is less than one answer of 2 actions in each of env.num_groups=2 groups\nhint: use 4 at least" in text
    jobs.prepare(load(f"{line} 4"))


def test_what_is_asked_is_counted_before_a_run():
    """8 environments in 2 groups, 10 actions each, 2 steps: the expert acts in all of them, then in half."""
    line = f"{EXPERT} --env.num_envs 8 --env.num_steps 10 --run.num_steps 2 --algorithm.query_rate 0.1"
    (note,) = [note for note in jobs.prepare(load(line)).notes if note.startswith("dagger:")]
    assert note.startswith("dagger: the expert names up to 124 actions beside those of demonstrations (124 answers,")
    (note,) = [
        n for n in jobs.prepare(load(f"{line} --algorithm.max_expert_actions 50")).notes if n.startswith("dagger:")
    ]
    assert "up to 50 actions" in note
    with pytest.raises(UserError, match=r"algorithm\.buffer_size=100000: the expert's answers take"):
        jobs.prepare(load(line), Machine(num_cpus=2, memory_bytes=100))


def test_demonstrations_are_counted_with_the_answers():
    pytest.importorskip("metaworld")
    config = load_config("faucet-dagger", [])  # two demonstrations of 20 actions at most
    (note,) = [note for note in jobs.prepare(config).notes if note.startswith("dagger:")]
    assert "MiB, and up to 40 demonstrated ones, 0.0 MiB of the actor's host memory" in note


def test_a_note_warns_of_an_optimizer_that_begins_anew_at_full_speed():
    pytest.importorskip("metaworld")
    fast = jobs.prepare(load_config("faucet-dagger", parse_overrides(["--actor.lr_warmup_steps", "0"])))
    assert any(note.startswith("actor.lr_warmup_steps=0: the optimizer begins anew") for note in fast.notes)
    usual = jobs.prepare(load_config("faucet-dagger", []))
    assert not any("lr_warmup_steps" in note for note in usual.notes)


VLA = (
    f"{DAGGER} --env.kind metaworld --env.id faucet-open-v3 --env.options.cameras corner --policy.name openvla_oft "
    "--policy.options.folder published --actor.backend fsdp2 --cluster.num_devices 2 --sft_warm_up.source experts "
    "--sft_warm_up.num_episodes 3 --env.max_episode_steps 100 --algorithm.buffer_size 1000"
)


def actor_s(line: str) -> float:
    """Planned seconds of the actor on two GPUs."""
    problem = embodied_problem(load(f"{VLA} {line}"), 2, gpu="H100", env_step_s=0.02)
    (instance,) = [
        one for one in problem.profiles.stages["actor"].instances if (one.num_devices, one.num_ranks) == (1, 2)
    ]
    return instance.points[-1].seconds + instance.step_s


def test_a_plan_has_the_updates_from_the_buffer_and_names_its_memory():
    """The time is that of the observations in batches, whatever is collected."""
    twenty = actor_s("--algorithm.num_updates 20")
    assert actor_s("--algorithm.num_updates 60") == pytest.approx(3 * twenty)
    assert actor_s("--algorithm.num_updates 20 --env.num_steps 160") == pytest.approx(twenty)
    (note,) = embodied_notes(load(VLA), env_step_s=0.02)
    assert "keeps up to 1,000 answers, " in note
    assert "and up to 300 demonstrated ones, " in note


def test_a_plan_of_a_small_policy_is_refused():
    with pytest.raises(UserError, match=r"policy\.name=auto: what it takes is not known before it is profiled"):
        embodied_problem(load(f"{EXPERT} --cluster.num_devices 1"), 1, gpu="H100")

"""Off-policy algorithms in recipes: what a config needs, which policy goes with them, demonstrations as transitions."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from rlinf import jobs
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.embodied.demonstrated_transitions import transitions_of
from rlinf.jobs.embodied.flow import training_flow
from rlinf.jobs.embodied.planning import embodied_problem
from rlinf.machine import Machine
from rlinf_algos import off_policy_preset
from rlinf_envs import Demonstration
from rlinf_workers.policies import Needs

EXPERTS = "--env.kind metaworld --env.id reach-v3 --demonstrations.source experts"


def load(line: str, recipe: str = "pendulum-sac") -> Any:
    return load_config(recipe, parse_overrides(line.split()))


def message(line: str, recipe: str = "pendulum-sac") -> str:
    with pytest.raises(UserError) as caught:
        load(line, recipe)
    return str(caught.value)


def test_a_name_chooses_the_record_and_a_resolved_config_is_read_back(tmp_path):
    config = load(f"--algorithm.name rlpd {EXPERTS}", "env-ppo")
    assert config.algorithm == off_policy_preset("rlpd")
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(str(tmp_path / "resolved.yaml")) == config


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--algorithm.gama 0.9", "did you mean --algorithm.gamma?"),
        ("--algorithm.clip_low 0.1", "--algorithm.clip_low is not a key"),
        ("--algorithm.gamma 2", "--algorithm.gamma=2.0 must be between 0 and 1"),
        ("--algorithm.batch_size 255 --actor.num_shards 2", "batch_size=255 is not a multiple of actor.num_shards=2"),
        ("--algorithm.update_ratio 0.3", "=0.3 makes 19.2 updates of the critics out of the env.num_envs * "),
        ("--algorithm.policy_delay 100", "it must be a multiple of algorithm.policy_delay=100, and at least that"),
        ("--algorithm.name rlpd", "=0.5 needs demonstrations; give --demonstrations.source"),
        (EXPERTS, "demonstrations is not used: algorithm.demonstration_fraction=0; use algorithm.name=rlpd"),
        ("--algorithm.name rlpd --demonstrations.source experts", "source=experts goes with env.kind=metaworld"),
        ("--sft_warm_up.source experts --env.kind metaworld", "algorithm.name=sac does not imitate"),
        ("--actor.backend fsdp2", "=fsdp2 shards models over ranks"),
    ],
)
def test_what_a_config_refuses(line, says):
    assert says in message(line)


def test_demonstrations_go_with_off_policy_algorithms_alone():
    assert "learns on-policy; sft_warm_up imitates" in message(EXPERTS, "env-ppo")


def test_the_algorithm_decides_about_the_roles():
    for recipe, actor in (("pendulum-sac", "OffPolicyActor"), ("env-ppo", "EmbodiedActor")):
        flow = training_flow(load("", recipe), on_host=False)
        assert flow.workers["actor"].worker_class.__name__ == actor


@pytest.mark.parametrize(
    ("recipe", "line", "says"),
    [
        ("pendulum-sac", "--policy.name actor_critic", "policy.name=actor_critic has no critics of actions"),
        ("env-ppo", "--policy.name soft_actor --env.id Pendulum-v1", "is trained by off-policy algorithms"),
        ("pendulum-sac", "--env.id CartPole-v1", "its actions are numbers, and those of the environment are choices"),
    ],
)
def test_policies_that_an_algorithm_cannot_train(recipe, line, says):
    with pytest.raises(UserError, match=says):
        jobs.prepare(load(line, recipe))


def test_demonstrations_have_no_noise(tmp_path):
    policy = {"flow": "pi0", "flow_folder": str(tmp_path), "width": 32, "value_width": 8}
    line = f"--policy.name soft_noise {EXPERTS} --env.options.cameras corner --env.options.image_size 28"
    overrides = parse_overrides([*line.split(), "--algorithm.name", "rlpd", "--policy.options", json.dumps(policy)])
    with pytest.raises(UserError, match="does not learn the actions that they have"):
        jobs.prepare(load_config("env-ppo", overrides))


def test_auto_chooses_the_soft_actor():
    job = jobs.prepare(load("--policy.name auto"))
    assert job.config.policy.name == "soft_actor"
    assert "policy.name=auto: soft_actor, because algorithm.name=sac learns off-policy" in job.notes


# -- memory of the buffers --------------------------------------------------------------------------------------------


def test_the_memory_of_full_buffers_is_noted_and_has_to_be_there():
    """Pendulum: 3 numbers of state, twice; 1 of action; a reward and an end. 10,240 transitions are collected."""
    line = "--run.num_steps 160 --algorithm.buffer_size"
    (note,) = [text for text in jobs.prepare(load(f"{line} 50000")).notes if text.startswith("replay")]
    assert note == "replay buffers: up to 10,240 transitions of 33 bytes, 0.3 MiB of the actor's host memory"
    assert any("up to 10,000 transitions" in note for note in jobs.prepare(load(f"{line} 10000")).notes)
    with pytest.raises(UserError, match=r"grow to 10,240 transitions .* and this machine has 0\.3 MiB") as caught:
        jobs.prepare(load(f"{line} 50000"), Machine(num_cpus=2, memory_bytes=10_240 * 33 - 1))
    assert "--algorithm.buffer_size 5119 at most" in str(caught.value.hint)
    jobs.prepare(load(f"{line} 50000"), Machine(num_cpus=2, memory_bytes=10_240 * 33))


def test_demonstrations_are_counted_with_the_buffers():
    """Ten, of 40 actions at most; a transition without pictures takes what one of the run takes."""
    pytest.importorskip("metaworld")
    config = load("--algorithm.buffer_size 5000", "faucet-rlpd")
    (note,) = [text for text in jobs.prepare(config).notes if text.startswith("replay")]
    row_bytes = re.search(r"up to 5,000 transitions of (\d+) bytes, .* MiB, and up to 400 demonstrated", note)
    assert row_bytes, note
    needed_bytes = 5400 * int(row_bytes[1])
    jobs.prepare(config, Machine(num_cpus=2, memory_bytes=needed_bytes))
    with pytest.raises(UserError, match=r"up to 400 demonstrated ones, 0\.1 MiB, and this machine has"):
        jobs.prepare(config, Machine(num_cpus=2, memory_bytes=needed_bytes - 1))


def test_a_plan_is_refused_with_what_counts_the_buffers():
    config = load("--cluster.num_devices 1")
    with pytest.raises(UserError, match="what its policies and critics take is not known") as caught:
        embodied_problem(config, 1, gpu="H100")
    assert "counted before a run starts" in str(caught.value.hint)


# -- demonstrations ----------------------------------------------------------------------------------------------------


def demonstration(length: int) -> Demonstration:
    steps = torch.arange(length, dtype=torch.float32)
    return Demonstration(
        task="reach",
        seed=None,
        observations={"state": steps[:, None].expand(length, 2).clone()},
        actions=10 + steps[:, None],
        rewards=100 + steps,
        success=True,
    )


def table(transitions: Any) -> list[tuple[float, list[float], float, float, bool]]:
    return [
        (
            transitions.fields["state"][row, 0, 0].item(),
            transitions.actions[row, 0, :, 0].tolist(),
            transitions.rewards[row, 0].item(),
            transitions.next_fields["state"][row, 0, 0].item(),
            transitions.terminated[row, 0].item(),
        )
        for row in range(len(transitions.rewards))
    ]


def test_the_last_transition_of_a_demonstration_ends_the_episode():
    needs = Needs(reads=("state",))
    assert table(transitions_of([demonstration(2), demonstration(1)], needs, terminates=True)) == [
        (0, [10], 100, 1, False),
        (1, [11], 101, 1, True),  # its next state does not count
        (0, [10], 100, 0, True),
    ]
    assert table(transitions_of([demonstration(3)], needs, terminates=False)) == [
        (0, [10], 100, 1, False),
        (1, [11], 101, 2, False),  # what followed the last action was not recorded
    ]


def test_a_chunk_at_the_end_repeats_the_last_action_and_counts_its_reward_once():
    needs = Needs(reads=("state",), chunk_size=2)
    assert table(transitions_of([demonstration(3)], needs, terminates=True)) == [
        (0, [10, 11], 201, 2, False),
        (1, [11, 12], 203, 2, True),
        (2, [12, 12], 102, 2, True),
    ]
    assert table(transitions_of([demonstration(3)], needs, terminates=False)) == [(0, [10, 11], 201, 2, False)]

"""The section `algorithm`: a name chooses, every field may be changed, and nothing in it is without effect."""

import dataclasses
import shlex
from typing import Any

import pytest

from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.config.schema import json_schema
from rlinf.errors import UserError
from rlinf_algos import FIELDS_OF_SAMPLES, Algorithm, preset
from rlinf_algos.algorithm import EPISODE_PRESETS, PRESETS

WHOLE = "--env.episodes_per_step"
FIELDS = {field.name for field in dataclasses.fields(Algorithm)}


def algorithm(line: str = "", recipe: str = "sort-grpo") -> Algorithm:
    config: Any = load_config(recipe, parse_overrides(line.split()))
    return config.algorithm


def message(line: str, recipe: str = "sort-grpo") -> str:
    with pytest.raises(UserError) as caught:
        load_config(recipe, parse_overrides(line.split()))
    return str(caught.value)


@pytest.mark.parametrize(("recipe", "other"), [("sort-grpo", "episodes"), ("pushcube-ppo", "completions")])
def test_a_resolved_config_has_what_makes_sense_for_its_job(recipe, other):
    fields = load_config(recipe).model_dump()["algorithm"]
    assert set(fields) == FIELDS - {"samples"} - set(FIELDS_OF_SAMPLES[other])


def test_every_field_is_described():
    properties = json_schema()["$defs"]["Algorithm"]["properties"]
    assert set(properties) == FIELDS
    assert properties["kl_coef"]["description"].startswith("Weight of the KL divergence from the reference model")


NEEDS = {
    "gdpo": ["--reward", "{kind: weighted, terms: {answer: {weight: 1.0, reward: {kind: exact}}}}"],
    "distillation": ["--reference.path", "teacher"],
}
"""Algorithm -> what it needs of other sections."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_chooses_a_preset(name):
    config: Any = load_config("sort-grpo", parse_overrides(["--algorithm.name", name, *NEEDS.get(name, [])]))
    assert config.algorithm == preset(name)


@pytest.mark.parametrize("name", EPISODE_PRESETS)
def test_a_name_chooses_a_preset_of_robots(name):
    own = {"gamma": 0.95, "gae_lambda": 0.9, "bootstrap_at_termination": True} if name == "ppo" else {}
    recipe = ["--algorithm.name", name]
    config: Any = load_config("pushcube-ppo", parse_overrides(recipe))
    assert config.algorithm == preset(name, samples="episodes", **own)


def test_an_algorithm_with_a_critic_has_its_settings():
    config: Any = load_config(
        "sort-grpo", parse_overrides(["--algorithm.name", "ppo", "--critic.learning_rate", "0.1"])
    )
    assert config.job == "reasoning"
    assert config.critic.learning_rate == 0.1


def test_a_changed_name_starts_the_section_afresh_wherever_it_stands():
    assert algorithm("--algorithm.clip_high 0.3 --algorithm.name gspo").clip_high == 0.3
    assert algorithm("--algorithm.name gspo").clip_low == 3e-4
    assert algorithm("--algorithm.name grpo --algorithm.group_size 4").group_size == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--algorithm.reward_level action", "algorithm.reward_level=action is finer than ratio_level=chunk: one ratio"),
        ("--algorithm.ratio_level step", "algorithm.ratio_level='step'; allowed: 'chunk', 'action' or 'token'"),
        (
            "--algorithm.name grpo --algorithm.ratio_level=token --algorithm.reward_level=action",
            "algorithm.reward_level=action is not used: advantage=grpo gives all of an episode one advantage",
        ),
    ],
)
def test_levels_that_do_not_go_together(line, says):
    assert says in message(line, "pushcube-ppo")


def test_the_resolved_config_is_read_back_as_it_was(tmp_path):
    for line in ("--algorithm.name ppo --algorithm.value_clip null", "--algorithm.name rloo", ""):
        config = load_config("sort-grpo", parse_overrides(line.split()))
        file = tmp_path / "resolved.yaml"
        file.write_text(to_yaml(config))
        assert load_config(str(file)) == config


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--algorithm.name grop", "--algorithm.name=grop: no algorithm is called"),
        ("--algorithm.name grop", "did you mean 'grpo'"),
        ("--algorithm.clip_lo 0.1", "did you mean --algorithm.clip_low?"),
        ("--algorithm.gae_lambda 0.9", "--algorithm.gae_lambda=0.9 is not used: it belongs to"),
        ("--algorithm.advantage rlo", "did you mean 'rloo'"),
        ("--algorithm.clip_low 2", "--algorithm.clip_low=2.0 must be between 0 and 1: a probability ratio"),
        ("--algorithm.aggregation token-mean", "algorithm.aggregation='token-mean'; allowed: 'token_mean'"),
        ("--algorithm.name rloo --algorithm.group_size 1", "compares the completions of a prompt; use at least 2"),
        ("--algorithm.overlong_buffer_tokens 10", "=10 is more than rollout.max_new_tokens=9; use at most 9"),
        (
            "--critic.learning_rate 0.1",
            "critic.learning_rate=0.1 is not used: algorithm.advantage=grpo has no critic; leave it out",
        ),
        ("--algorithm.name 3", "algorithm.name=3: no algorithm is called '3'"),
        ("--algorithm 3", "a section with the keys name, samples, group_size"),
        ("--algorithm.group_size true", "--algorithm.group_size=true; allowed: a whole number"),
        ("--algorithm.kl_coef .inf", "--algorithm.kl_coef=inf; allowed: a finite number"),
        ("--algorithm.target_kl 0.1", "algorithm.target_kl=0.1 is not used: it is about episodes, and samples are"),
        (
            "--algorithm.advantage gae_steps",
            "algorithm.advantage=gae_steps cannot be computed for completions; use grpo, rloo",
        ),
        ("--algorithm.samples episodes", "algorithm.samples=episodes: the samples of this job are completions; leave"),
        (
            "--algorithm.name gdpo",
            "algorithm.advantage=gdpo needs the components of a reward, but reward.kind=exact has none",
        ),
        ("--algorithm.name distillation", "reference.path is not set, and algorithm.reward_coef=0 learns from the KL"),
        ("--reference.path teacher", "is not used: algorithm.kl_coef is 0, so there is no reference model"),
        (
            "--algorithm.name ppo --algorithm.kl_coef 0.1 --algorithm.kl_target 6 --algorithm.kl_horizon 100",
            "algorithm.kl_horizon=100 is less than the 512 completions of a step; use at least 512",
        ),
        (
            "--algorithm.name otb --actor.backend megatron --mode collocated",
            "algorithm.advantage=otb reads every probability of a token's distribution, which actor.backend=megatron",
        ),
        (
            "--algorithm.router_aux_coef 0.1 --actor.backend megatron --mode collocated",
            "algorithm.router_aux_coef=0.1: actor.backend=megatron does not give the actor its routers' logits; use",
        ),
        ("--reference.sync_every 5", "reference.sync_every=5 is not used: algorithm.kl_coef is 0, so there is no"),
        (
            "--reference.sync_every 5 --algorithm.kl_coef 0.1 --reference.path teacher",
            "reference.sync_every=5 is not used: reference.path is a teacher, which does not follow its student",
        ),
        (
            "--reference.sync_every 5 --algorithm.kl_coef 0.1 --actor.lora.rank 4",
            "reference.sync_every=5 is not used: with actor.lora the reference is the model without its adapter",
        ),
        (
            "--reference.sync_weight 0.5 --algorithm.kl_coef 0.1",
            "reference.sync_weight=0.5 is not used: it belongs to reference.sync_every, which is null",
        ),
        ("--run.wandb.mode=offlin", "run.loggers.wandb.mode='offlin'; allowed: 'online' or 'offline'"),
        ("--algorithm.advantage no_such:thing", "cannot be imported: No module named 'no_such'"),
    ],
)
def test_mistakes(line, expected):
    assert expected in message(line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--algorithm.name grpo --env.num_envs 16 --algorithm.gae_lambda 0.9",
            "algorithm.gae_lambda=0.9 is not used: it belongs to advantage=gae_steps, and this is advantage=grpo",
        ),
        ("--algorithm.name grpo --env.num_envs 4 --env.num_groups 4", "use at least 8, better 32"),
        (
            "--algorithm.name grpo --env.num_envs 16 --env.num_steps 25",
            "env.num_steps=25 differs from env.max_episode_steps=50, and algorithm.advantage=grpo compares whole",
        ),
        (
            "--algorithm.name grpo --env.num_envs 16 --algorithm.gamma 0.9",
            "algorithm.gamma=0.9 is not used: it belongs to advantage=gae_steps or grpo_steps or gigpo or turn_returns",
        ),
        ("--algorithm.gamma null", "algorithm.gamma is null; it belongs to advantage=gae_steps or grpo_steps or gigpo"),
        ("--algorithm.gae_lambda null", "algorithm.gae_lambda is null; it belongs to advantage=gae_steps"),
        ("--algorithm.value_coef null", "algorithm.value_coef is null; it weighs the values that advantage=gae_steps"),
        ("--algorithm.name gppo", "no algorithm is called 'gppo'; did you mean 'ppo'?"),
        ("--algorithm.name dapo", "=dapo: its samples are completions of a language model; of episodes: ppo, grpo"),
        (
            "--algorithm.advantage gae",
            "algorithm.advantage=gae cannot be computed for episodes; use grpo, rloo, opo, pass_at_k, gae_steps",
        ),
        ("--algorithm.advantage gdpo", "algorithm.advantage=gdpo cannot be computed for episodes"),
        ("--algorithm.kl_coef 0.1", "--algorithm.kl_coef=0.1 is not used: it is about completions, and samples are"),
        ("--algorithm.group_size 4", "algorithm.group_size=4 is not used: it belongs to env.episodes_per_step"),
        (
            "--algorithm.dynamic_sampling true --algorithm.group_size 2",
            "dynamic_sampling=true is not used: it belongs to",
        ),
        (
            f"{WHOLE} 20 --algorithm.name grpo --actor.num_shards 2",
            "=20 is not a multiple of algorithm.group_size=8 times actor.num_shards=2; use 16 or 32",
        ),
        (
            f"{WHOLE} 16 --algorithm.name grpo --env.num_steps 25",
            "env.num_steps=25 would cut or continue episodes, and env.episodes_per_step=16 trains on whole",
        ),
        (
            f"{WHOLE} 8 --algorithm.num_minibatches 5 --actor.num_shards 2",
            "algorithm.num_minibatches=5 is more than the 4 episodes of a shard, which are one sample each at least",
        ),
        (
            f"{WHOLE} 64 --algorithm.name grpo --algorithm.dynamic_sampling true --algorithm.num_minibatches 9",
            "num_minibatches=9 is more than the 8 episodes of a group, all that dynamic_sampling may leave of a shard",
        ),
        (
            f"{WHOLE} 16 --algorithm.name grpo --algorithm.group_size 1",
            "algorithm.group_size=1: advantage=grpo compares the episodes of a start; use at least 2",
        ),
        (f"{WHOLE} 16 --algorithm.name sac", "episodes_per_step=16 is not used: algorithm.name=sac learns from single"),
        ("--algorithm.overlong_filter true", "algorithm.overlong_filter=True is not used: it is about completions"),
        ("--algorithm.samples completions", "algorithm.samples=completions: the samples of this job are episodes"),
        ("--algorithm.clip 0.2", "--algorithm.clip is not a key; did you mean --algorithm.clip_low?"),
        ("--algorithm.minibatch_size 9", "is not a key; did you mean --algorithm.num_minibatches?"),
        ("--algorithm.num_steps 9", "is not a key; did you mean --run.num_steps or --env.num_steps or"),
    ],
)
def test_mistakes_of_the_embodied_job(line, expected):
    assert expected in message(line, "pushcube-ppo")


def test_several_mistakes_of_an_algorithm_are_told_at_once():
    text = message("--algorithm.kl_coef 0.1 --algorithm.clip_low 2 --algorithm.advantage gae", "pushcube-ppo")
    assert text.startswith("the config has 4 mistakes")


def test_robots_are_compared_by_episodes_or_by_steps():
    line = "--algorithm.name grpo --env.num_envs 16"
    by_episodes = algorithm(line, "pushcube-ppo")
    assert (by_episodes.advantage, by_episodes.value_coef, by_episodes.gamma) == ("grpo", None, None)
    assert algorithm(line + " --algorithm.advantage grpo_steps", "pushcube-ppo").gamma == 0.99


def test_hubers_loss_clips_values_only_where_a_recipe_says_so():
    assert algorithm("--algorithm.name ppo --algorithm.value_loss huber").value_clip is None
    assert algorithm("--algorithm.name ppo").value_clip == 0.2
    assert algorithm("--algorithm.name ppo --algorithm.value_loss huber --algorithm.value_clip 0.1").value_clip == 0.1


@pytest.mark.parametrize(
    "line",
    [
        "--algorithm.policy_loss cispo",
        "--algorithm.policy_loss sapo --algorithm.options {tau_positive: 1.0}",
        "--algorithm.policy_loss decoupled",
        "--algorithm.correction icepop",
        "--algorithm.value_loss huber",
        "--algorithm.value_clip 0.2",
        "--algorithm.value_loss huber --algorithm.value_clip 0.2",
        "--algorithm.episode_aggregation episode_mean --algorithm.bootstrap_at_truncation false",
        "--algorithm.name grpo --algorithm.advantage rloo --algorithm.whiten_advantages true",
    ],
)
def test_a_robot_may_have(line):
    config: Any = load_config("pushcube-ppo", parse_overrides(shlex.split(line.replace("{", "'{").replace("}", "}'"))))
    assert config.algorithm.samples == "episodes"


def test_quantized_weights_are_corrected_unless_the_recipe_says_otherwise():
    """Where another part weighs the samples by actor over engine already, nothing is added."""
    assert algorithm().correction is None
    quantized = "--rollout.quantization fp8 "
    assert (algorithm(quantized).correction, algorithm(quantized).correction_high) == ("truncated", 2.0)
    assert algorithm(quantized + "--algorithm.correction null").correction is None
    assert algorithm(quantized + "--algorithm.correction icepop").correction == "icepop"
    assert algorithm(quantized + "--algorithm.proximal_policy rollout").correction is None

"""The section `algorithm`: a name chooses, every field may be changed, and nothing in it is without effect."""

import pytest

from rlinf.config.algorithm import AlgorithmConfig
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf_algos.algorithm import PRESETS, Algorithm, preset


def algorithm(line: str = "", recipe: str = "sort-grpo") -> AlgorithmConfig:
    config = load_config(recipe, parse_overrides(line.split()))
    assert config.job == "reasoning"
    return config.algorithm


def message(line: str, recipe: str = "sort-grpo") -> str:
    with pytest.raises(UserError) as caught:
        load_config(recipe, parse_overrides(line.split()))
    return str(caught.value)


def test_the_section_has_the_fields_of_an_algorithm():
    assert set(AlgorithmConfig.model_fields) == set(Algorithm.__slots__)
    assert {name: field.default for name, field in AlgorithmConfig.model_fields.items() if name != "name"} == {
        name: Algorithm.__dataclass_fields__[name].default
        for name in Algorithm.__slots__
        if name not in ("name", "options")
    } | {"options": {}}


NEEDS = {
    "gdpo": ["--reward", "{kind: weighted, terms: {answer: {weight: 1.0, reward: {kind: exact}}}}"],
    "distillation": ["--reference.path", "teacher"],
}
"""Algorithm -> what it needs of other sections."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_chooses_a_preset(name):
    config = load_config("sort-grpo", parse_overrides(["--algorithm.name", name, *NEEDS.get(name, [])]))
    assert config.job == "reasoning"
    assert config.algorithm.to_algorithm() == preset(name)


def test_an_algorithm_with_a_critic_has_its_settings():
    config = load_config("sort-grpo", parse_overrides(["--algorithm.name", "ppo", "--critic.learning_rate", "0.1"]))
    assert config.job == "reasoning"
    assert config.critic.learning_rate == 0.1


def test_a_changed_name_starts_the_section_afresh_wherever_it_stands():
    assert algorithm("--algorithm.clip_high 0.3 --algorithm.name gspo").clip_high == 0.3
    assert algorithm("--algorithm.name gspo").clip_low == 3e-4
    assert algorithm("--algorithm.name grpo --algorithm.group_size 4").group_size == 4


def test_the_resolved_config_is_read_back_as_it_was(tmp_path):
    for line in ("--algorithm.name ppo --algorithm.value_clip null", "--algorithm.name rloo", ""):
        config = load_config("sort-grpo", parse_overrides(line.split()))
        file = tmp_path / "resolved.yaml"
        file.write_text(to_yaml(config))
        assert load_config(str(file)) == config


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--algorithm.name grop", "--algorithm.name: algorithm.name=grop: no algorithm is called"),
        ("--algorithm.name grop", "did you mean 'grpo'"),
        ("--algorithm.clip_lo 0.1", "did you mean --algorithm.clip_low?"),
        ("--algorithm.gae_lambda 0.9", "--algorithm.gae_lambda: algorithm.gae_lambda=0.9 is not used: it belongs to"),
        ("--algorithm.advantage rlo", "did you mean 'rloo'"),
        ("--algorithm.clip_low 2", "algorithm.clip_low=2; allowed: 1 or less"),
        ("--algorithm.aggregation token-mean", "algorithm.aggregation='token-mean'; allowed: 'token_mean'"),
        ("--algorithm.name rloo --algorithm.group_size 1", "compares the completions of a prompt; use at least 2"),
        ("--algorithm.overlong_buffer_tokens 10", "=10 is more than rollout.max_new_tokens=9; use at most 9"),
        (
            "--critic.learning_rate 0.1",
            "critic.learning_rate=0.1 is not used: algorithm.advantage=grpo has no critic; leave it out",
        ),
        ("--algorithm.name 3", "algorithm.name=3; allowed: text"),
        ("--algorithm 3", "a section with the keys name, group_size"),
        (
            "--algorithm.name gdpo",
            "algorithm.advantage=gdpo reads the parts of a reward, and reward.kind=exact has none",
        ),
        ("--algorithm.name distillation", "reference.path is not set, and algorithm.reward_coef=0 learns from the KL"),
        ("--reference.path teacher", "is not used: algorithm.kl_coef is 0, so no reference is asked"),
        (
            "--algorithm.name ppo --algorithm.kl_coef 0.1 --algorithm.kl_target 6 --algorithm.kl_horizon 100",
            "algorithm.kl_horizon=100 is less than the 512 completions of a step; use at least 512",
        ),
        ("--run.wandb.project ''", "run.wandb.project"),
        ("--algorithm.advantage no_such:thing", "cannot be imported: No module named 'no_such'"),
    ],
)
def test_mistakes(line, expected):
    assert expected in message(line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--algorithm.compares steps", "algorithm.compares=steps is not used: it belongs to algorithm.name=grpo"),
        (
            "--algorithm.name grpo --env.num_envs 16 --algorithm.gae_lambda 0.9",
            "algorithm.gae_lambda=0.9 is not used: it belongs to algorithm.name=ppo, and this is grpo",
        ),
        ("--algorithm.name grpo --env.num_envs 4", "use at least 8, better 32"),
        (
            "--algorithm.name grpo --env.num_envs 16 --algorithm.num_steps 25",
            "algorithm.num_steps=25 differs from env.max_episode_steps=50",
        ),
        (
            "--algorithm.name grpo --env.num_envs 16 --algorithm.gamma 0.9",
            "algorithm.gamma=0.9 is not used: algorithm.compares=episodes adds the rewards up as they are",
        ),
        ("--algorithm.gamma null", "algorithm.gamma is null; algorithm.name=ppo needs it"),
        ("--algorithm.gae_lambda null", "algorithm.gae_lambda is null; algorithm.name=ppo needs it"),
        ("--algorithm.name gppo", "allowed: 'ppo' or 'grpo'"),
    ],
)
def test_mistakes_of_the_embodied_job(line, expected):
    assert expected in message(line, "pushcube-ppo")


def test_the_embodied_job_has_grpo():
    config = load_config("pushcube-ppo", parse_overrides(["--algorithm.name", "grpo", "--env.num_envs", "16"]))
    assert config.job == "embodied"
    assert (config.algorithm.compares, config.algorithm.value_coef, config.algorithm.gamma) == ("episodes", None, None)
    line = ["--algorithm.name", "grpo", "--env.num_envs", "16", "--algorithm.compares", "steps"]
    config = load_config("pushcube-ppo", parse_overrides(line))
    assert config.job == "embodied"
    assert config.algorithm.gamma == 0.8

"""The named algorithms, the defaults and ranges of the settings that only some algorithms use, and the names of other
choices. Does not import torch."""

import math
from collections.abc import Callable
from typing import Any

from rlinf_algos.registry import Registry

AGGREGATIONS = (
    "token_mean",
    "token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant_length_mean",
)
KL_ESTIMATES: Registry[Callable[..., Any]] = Registry(
    "KL estimate",
    {
        "k1": "rlinf_algos.kl:kl_k1",
        "k2": "rlinf_algos.kl:kl_k2",
        "k3": "rlinf_algos.kl:kl_k3",
        "abs": "rlinf_algos.kl:kl_abs",
        "k1+": "rlinf_algos.kl:kl_k1_plus",
        "k3+": "rlinf_algos.kl:kl_k3_plus",
    },
)
"""The KL estimators that an algorithm may name."""
CORRECTIONS = ("truncated", "masked", "rejected", "icepop")
CORRECTION_LEVELS = ("token", "sequence", "geometric")
REJECTIONS = (
    *(
        f"{reduced}_{estimate}"
        for reduced in ("token", "sequence_sum", "sequence_mean")
        for estimate in ("k1", "k2", "k3")
    ),
    "sequence_max_k2",
    "sequence_max_k3",
)
PROXIMAL_POLICIES = ("actor", "rollout")
VALUE_LOSSES = ("clipped", "huber")
REWARD_LEVELS = ("chunk", "action")
RATIO_LEVELS = (*REWARD_LEVELS, "token")
EPISODE_AGGREGATIONS = ("chunk_mean", "episode_mean")


DEFAULTS: dict[str, bool | int | float | str | None] = {
    "normalize_std": True,
    "gamma": 1.0,
    "gae_lambda": 1.0,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "weight_cap": 5.0,
    "correction_level": None,
    "correction_low": None,
    "correction_high": None,
    "rejection_limit": None,
    "kl_clamp": None,
    "kl_horizon": 10_000,
    "entropy_coef_step": 0.005,
    "value_loss": "clipped",
    "value_clip": 0.2,
    "huber_delta": 10.0,
    "overlong_penalty": 1.0,
    "bootstrap_at_termination": False,
    "bootstrap_at_truncation": True,
    "value_coef": 0.5,
}
"""Fields that only some algorithms use -> their value unless a preset sets another."""
CORRECTION_OPTIONS: dict[str, dict[str, float | str]] = {
    "truncated": {"correction_level": "token", "correction_high": 2.0},
    "masked": {"correction_level": "token", "correction_low": 0.0, "correction_high": 2.0},
    "rejected": {"correction_level": "token", "correction_low": 0.5, "correction_high": 2.0},
    "icepop": {"correction_low": 0.5, "correction_high": 5.0},
}
"""Correction -> its options, with their defaults."""
NULLABLE = {"dual_clip", "weight_cap", "value_clip", "kl_clamp"}
"""Fields of `DEFAULTS` for which None is a valid setting, even in an algorithm that uses them."""

_DPPO: dict[str, Any] = {
    "normalize_std": False,
    "aggregation": "constant_length_mean",
    "proximal_policy": "rollout",
    "num_minibatches": 4,
}
"""With the advantages of Dr. GRPO and the rollout policy as proximal policy, as in the authors' recipe in verl."""
OPTIONS_OF_RATIO = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "ratio_cap",
    "tau_positive",
    "tau_negative",
    "cov_kl_coef",
)
"""Arguments of policy losses that change neither value nor gradient if every probability ratio is 1."""

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": "gae", "whiten_advantages": True, "kl": "k1", "kl_in": "reward", "num_minibatches": 2},
    "grpo": {},
    "dr_grpo": {"normalize_std": False, "aggregation": "constant_length_mean"},
    "dapo": {"clip_high": 0.28, "dynamic_sampling": True, "num_minibatches": 2},
    "rloo": {
        "advantage": "rloo",
        "policy_loss": "policy_gradient",
        "aggregation": "sequence_mean_token_sum",
        "kl": "k1",
        "kl_in": "reward",
    },
    "reinforce_plus_plus": {
        "advantage": "returns",
        "whiten_advantages": True,
        "kl": "k1",
        "kl_in": "reward",
        "num_minibatches": 2,
    },
    "reinforce_plus_plus_baseline": {
        "normalize_std": False,
        "whiten_advantages": True,
        "kl": "k2",
        "num_minibatches": 2,
    },
    "gspo": {
        "policy_loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean_token_mean",
        "num_minibatches": 4,
    },
    "rloo_clip": {
        "advantage": "rloo",
        "policy_loss": "sequence_clip",
        "aggregation": "sequence_mean_token_mean",
        "kl": "k1",
        "kl_in": "reward",
        "num_minibatches": 2,
    },
    "dppo_tv": {**_DPPO, "policy_loss": "dppo_tv", "clip_low": 0.15, "clip_high": 0.15},
    "dppo_kl": {**_DPPO, "policy_loss": "dppo_kl", "clip_low": 0.05, "clip_high": 0.05},
    "pass_at_k": {"advantage": "pass_at_k"},
    "otb": {"advantage": "otb"},
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "num_minibatches": 2},
    "gmpo": {
        "policy_loss": "gmpo",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregation": "sequence_mean_token_mean",
        "num_minibatches": 4,
    },
    "gdpo": {"advantage": "gdpo", "whiten_advantages": True},
    "gigpo": {"advantage": "gigpo", "gamma": 0.95},
    "distillation": {
        "advantage": "returns",
        "gamma": 0.0,
        "reward_coef": 0.0,
        "kl": "k1",
        "kl_in": "reward",
        "kl_coef": 1.0,
    },
}
"""Name -> the settings that differ from the defaults; docs/algorithms gives the source of each number."""

_OF_EPISODES: dict[str, Any] = {
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "value_clip": None,
    "num_minibatches": 4,
    "num_epochs": 8,
    "target_kl": 0.1,
}
"""gamma and gae_lambda as in CleanRL's PPO for Gymnasium; the rest as in ManiSkill's baseline for short tasks."""
EPISODE_PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {**_OF_EPISODES, "advantage": "gae_steps", "whiten_advantages": True, "group_size": 1},
    "grpo": _OF_EPISODES,
    "gigpo": {**_OF_EPISODES, "advantage": "gigpo", "gamma": 0.95},
}
"""The same for samples that are episodes of environments."""

OFF_POLICY_PRESETS: dict[str, dict[str, Any]] = {
    "sac": {},
    "rlpd": {
        "update_ratio": 20.0,
        "policy_delay": 20,
        "num_critics": 10,
        "policy_value": "mean",
        "critic_layer_norm": True,
        "target_entropy": -0.5,
        "demonstration_fraction": 0.5,
    },
}
"""Name -> the settings that differ from the defaults. sac: stable-baselines3's defaults; rlpd: the authors' for states
(ikostrikov, rlpd)."""

DAGGER = "dagger"
"""The name of `DaggerAlgorithm`."""

FIELDS_OF_SAMPLES: dict[str, tuple[str, ...]] = {
    "completions": (
        "aggregation",
        "proximal_policy",
        "kl",
        "kl_coef",
        "kl_in",
        "kl_bias_correction",
        "kl_clamp",
        "kl_target",
        "kl_horizon",
        "reward_coef",
        "entropy_target",
        "entropy_coef_step",
        "router_aux_coef",
        "overlong_buffer_tokens",
        "overlong_penalty",
        "overlong_filter",
    ),
    "episodes": (
        "value_coef",
        "bootstrap_at_termination",
        "bootstrap_at_truncation",
        "target_kl",
        "reward_level",
        "ratio_level",
        "episode_aggregation",
    ),
}
"""Kind of samples -> the fields that apply only to these samples."""

RANGES: dict[str, tuple[float, float, str]] = {
    "gamma": (0.0, 1.0, "it is a discount"),
    "gae_lambda": (0.0, 1.0, "it is a trace decay"),
    "clip_low": (0.0, 1.0, "a probability ratio is not negative"),
    "clip_high": (0.0, math.inf, "the range must contain the ratio 1"),
    "weight_cap": (1.0, math.inf, "on-policy weights are 1"),
    "kl_coef": (0.0, math.inf, "a reward for leaving the reference is no penalty"),
    "reward_coef": (0.0, math.inf, "a negative one would teach the opposite"),
    "kl_horizon": (1, math.inf, "it counts completions"),
    "off_policy_threshold": (0.0, math.inf, "an on-policy token, whose difference is 0, must be kept"),
    "entropy_coef_step": (0.0, 1.0, "it is the step by which a weight changes"),
    "router_aux_coef": (0.0, math.inf, "it is the weight of a loss"),
    "entropy_coef": (0.0, math.inf, "it is the weight of a bonus"),
    "value_coef": (0.0, math.inf, "it is the weight of a loss"),
    "correction_low": (0.0, 1.0, "the range must contain the ratio 1"),
    "correction_high": (1.0, math.inf, "the range must contain the ratio 1"),
    "value_clip": (0.0, math.inf, "it is a distance"),
    "oversampling": (1.0, math.inf, "an update needs all of its prompts"),
    "overlong_buffer_tokens": (0, math.inf, "it counts tokens"),
    "overlong_penalty": (0.0, math.inf, "it is subtracted from the reward"),
    "group_size": (1, math.inf, "a prompt has at least one completion"),
    "max_staleness": (0, 8, "samples of much older weights teach little"),
    "num_minibatches": (1, math.inf, "a step trains at least once"),
    "num_epochs": (1, math.inf, "a step trains at least once"),
}

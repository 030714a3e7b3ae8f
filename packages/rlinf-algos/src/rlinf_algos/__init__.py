"""The mathematics of reinforcement-learning post-training, as pure functions on tensors.

From the rewards to the number to minimise: `rewards` -> `grpo_advantages` or `gae` -> `token_logprobs` ->
`ppo_clip_loss`, `clipped_value_loss`, `kl_k3` -> `token_mean`. Masked-out elements reach nothing, NaN included; a
non-finite number inside the mask raises `NonFiniteError` with its place. Nothing broadcasts by accident.
"""

from rlinf_algos.advantages import gae, grpo_advantages, token_gae
from rlinf_algos.aggregation import (
    constant_length_mean,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
)
from rlinf_algos.checks import check_finite
from rlinf_algos.errors import AlgosError, NonFiniteError, RewardError, ShapeError
from rlinf_algos.evaluation import (
    Estimate,
    avg_at_k,
    bootstrap_interval,
    canonical_answer,
    maj_at_k,
    mean_over_problems,
    pass_at_k,
)
from rlinf_algos.gaussian import gaussian_entropy, gaussian_log_prob, gaussian_sample
from rlinf_algos.kl import kl_k1, kl_k2, kl_k3
from rlinf_algos.logprobs import entropy_of_logits, token_logprobs
from rlinf_algos.normalization import explained_variance, masked_mean, masked_whiten, normalize_advantages
from rlinf_algos.policy_loss import PolicyLoss, ppo_clip_loss
from rlinf_algos.rewards import (
    RewardResult,
    RewardSpec,
    get_reward,
    make_reward,
    register_reward,
    reward_names,
    score,
    score_all,
)
from rlinf_algos.value_loss import ValueLoss, clipped_value_loss

__version__ = "0.1.0"

__all__ = [
    "grpo_advantages",
    "gae",
    "token_gae",
    "masked_mean",
    "masked_whiten",
    "normalize_advantages",
    "explained_variance",
    "PolicyLoss",
    "ppo_clip_loss",
    "ValueLoss",
    "clipped_value_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant_length_mean",
    "token_logprobs",
    "entropy_of_logits",
    "gaussian_log_prob",
    "gaussian_entropy",
    "gaussian_sample",
    "RewardResult",
    "RewardSpec",
    "make_reward",
    "register_reward",
    "reward_names",
    "get_reward",
    "score",
    "score_all",
    "Estimate",
    "avg_at_k",
    "pass_at_k",
    "maj_at_k",
    "canonical_answer",
    "mean_over_problems",
    "bootstrap_interval",
    "check_finite",
    "AlgosError",
    "ShapeError",
    "NonFiniteError",
    "RewardError",
]

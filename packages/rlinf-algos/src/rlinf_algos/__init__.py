"""The mathematics of reinforcement-learning post-training, as pure functions on tensors.

From the rewards to the number to minimise: `rewards` -> `grpo_advantages` or `gae` -> `token_logprobs` ->
`ppo_clip_loss`, `clipped_value_loss`, `kl_k3` -> `token_mean`. Masked-out elements reach nothing, NaN included; a
non-finite number inside the mask raises `NonFiniteError` with its place. Nothing broadcasts by accident.
"""

from rlinf_algos.advantages import gae, grpo_advantages, token_gae
from rlinf_algos.aggregation import (
    constant_length_mean,
    count_tokens_and_sequences,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
)
from rlinf_algos.checks import check_finite
from rlinf_algos.entropy import entropy_bonus, high_entropy_mask
from rlinf_algos.errors import AlgosError, NonFiniteError, RewardError, ShapeError
from rlinf_algos.gaussian import gaussian_entropy, gaussian_log_prob, gaussian_sample
from rlinf_algos.kl import kl_k1, kl_k2, kl_k3
from rlinf_algos.logprobs import entropy_of_logits, logprobs_and_entropy, token_logprobs
from rlinf_algos.normalization import explained_variance, masked_mean, masked_whiten, normalize_advantages
from rlinf_algos.packing import sequence_ids_of
from rlinf_algos.policy_loss import (
    DecoupledPolicyLoss,
    PolicyLoss,
    at_level,
    cispo_loss,
    decoupled_ppo_loss,
    gspo_loss,
    logprobs_at_level,
    policy_gradient_loss,
    ppo_clip_loss,
    sapo_loss,
)
from rlinf_algos.rewards import RewardResult, get_reward, register_reward, reward_names, score, score_all
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
    "gspo_loss",
    "cispo_loss",
    "DecoupledPolicyLoss",
    "decoupled_ppo_loss",
    "policy_gradient_loss",
    "sapo_loss",
    "at_level",
    "logprobs_at_level",
    "entropy_bonus",
    "high_entropy_mask",
    "sequence_ids_of",
    "ValueLoss",
    "clipped_value_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant_length_mean",
    "count_tokens_and_sequences",
    "token_logprobs",
    "entropy_of_logits",
    "logprobs_and_entropy",
    "gaussian_log_prob",
    "gaussian_entropy",
    "gaussian_sample",
    "RewardResult",
    "register_reward",
    "reward_names",
    "get_reward",
    "score",
    "score_all",
    "check_finite",
    "AlgosError",
    "ShapeError",
    "NonFiniteError",
    "RewardError",
]

"""The mathematics of reinforcement-learning post-training, as pure functions on tensors.

From the rewards to the number to minimise: `rewards` -> `grpo_advantages` or `gae` -> `token_logprobs` ->
`ppo_clip_loss`, `clipped_value_loss`, `kl_k3` -> `token_mean`. Masked-out elements reach nothing, NaN included; a
non-finite number inside the mask raises `NonFiniteError` with its place. Nothing broadcasts by accident.
"""

from rlinf_algos.advantages import (
    baseline_advantages,
    dr_grpo_advantages,
    episode_group_advantages,
    first_episode_mask,
    gae,
    gigpo_advantages,
    group_mean,
    grpo_advantages,
    leave_one_out_mean,
    opo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    rewards_to_go,
    rloo_advantages,
    spread_over_tokens,
    state_group_ids,
    token_gae,
    turn_group_ids,
)
from rlinf_algos.aggregation import (
    constant_length_mean,
    count_tokens_and_sequences,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
)
from rlinf_algos.checks import check_finite
from rlinf_algos.corrections import (
    Correction,
    effective_sample_size,
    icepop,
    masked_importance_sampling,
    truncated_importance_sampling,
)
from rlinf_algos.dapo import GroupChoice, choose_groups, has_signal, overlong_filter, overlong_penalty
from rlinf_algos.distillation import distillation_terms, reverse_kl_advantages
from rlinf_algos.entropy import entropy_bonus, high_entropy_mask
from rlinf_algos.errors import AlgosError, NonFiniteError, RewardError, ShapeError
from rlinf_algos.gaussian import gaussian_entropy, gaussian_log_prob, gaussian_sample
from rlinf_algos.kl import (
    adapted_kl_coef,
    kl_abs,
    kl_full,
    kl_k1,
    kl_k1_plus,
    kl_k2,
    kl_k3,
    kl_k3_plus,
    kl_shaped_rewards,
    rewards_at_last_token,
)
from rlinf_algos.logprobs import entropy_of_logits, token_logprobs
from rlinf_algos.normalization import (
    Moments,
    explained_variance,
    masked_mean,
    masked_whiten,
    normalize_advantages,
    normalize_returns,
    sum_over_group,
)
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
)
from rlinf_algos.rewards import RewardResult, get_reward, register_reward, reward_names, score, score_all
from rlinf_algos.value_loss import ValueLoss, clipped_value_loss, huber_value_loss

__version__ = "0.1.0"

__all__ = [
    "grpo_advantages",
    "dr_grpo_advantages",
    "rloo_advantages",
    "opo_advantages",
    "baseline_advantages",
    "group_mean",
    "leave_one_out_mean",
    "gae",
    "token_gae",
    "rewards_to_go",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "gigpo_advantages",
    "episode_group_advantages",
    "turn_group_ids",
    "state_group_ids",
    "spread_over_tokens",
    "first_episode_mask",
    "masked_mean",
    "masked_whiten",
    "normalize_advantages",
    "normalize_returns",
    "Moments",
    "sum_over_group",
    "explained_variance",
    "PolicyLoss",
    "ppo_clip_loss",
    "gspo_loss",
    "cispo_loss",
    "DecoupledPolicyLoss",
    "decoupled_ppo_loss",
    "policy_gradient_loss",
    "at_level",
    "logprobs_at_level",
    "entropy_bonus",
    "high_entropy_mask",
    "sequence_ids_of",
    "ValueLoss",
    "clipped_value_loss",
    "huber_value_loss",
    "Correction",
    "truncated_importance_sampling",
    "masked_importance_sampling",
    "icepop",
    "effective_sample_size",
    "GroupChoice",
    "has_signal",
    "choose_groups",
    "overlong_penalty",
    "overlong_filter",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_abs",
    "kl_k1_plus",
    "kl_k3_plus",
    "kl_full",
    "rewards_at_last_token",
    "kl_shaped_rewards",
    "adapted_kl_coef",
    "reverse_kl_advantages",
    "distillation_terms",
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant_length_mean",
    "count_tokens_and_sequences",
    "token_logprobs",
    "entropy_of_logits",
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

from .advantages import (
    first_episode_mask as first_episode_mask,
)
from .advantages import (
    gae as gae,
)
from .advantages import (
    gdpo_advantages as gdpo_advantages,
)
from .advantages import (
    gigpo_advantages as gigpo_advantages,
)
from .advantages import (
    grpo_advantages as grpo_advantages,
)
from .advantages import (
    opo_advantages as opo_advantages,
)
from .advantages import (
    optimal_token_advantages as optimal_token_advantages,
)
from .advantages import (
    pass_at_k_advantages as pass_at_k_advantages,
)
from .advantages import (
    rewards_to_go as rewards_to_go,
)
from .advantages import (
    rloo_advantages as rloo_advantages,
)
from .advantages import (
    step_group_advantages as step_group_advantages,
)
from .advantages import (
    token_gae as token_gae,
)
from .aggregation import (
    aggregated_sum as aggregated_sum,
)
from .aggregation import (
    aggregation_divisor as aggregation_divisor,
)
from .aggregation import (
    constant_length_mean as constant_length_mean,
)
from .aggregation import (
    sequence_mean_token_mean as sequence_mean_token_mean,
)
from .aggregation import (
    sequence_mean_token_sum as sequence_mean_token_sum,
)
from .aggregation import (
    token_mean as token_mean,
)
from .aggregation import (
    token_sum as token_sum,
)
from .algorithm import (
    Algorithm as Algorithm,
)
from .algorithm import (
    AlgorithmError as AlgorithmError,
)
from .algorithm import (
    filled as filled,
)
from .algorithm import (
    preset as preset,
)
from .checks import check_finite as check_finite
from .corrections import (
    Correction as Correction,
)
from .corrections import (
    icepop as icepop,
)
from .corrections import (
    masked_importance_sampling as masked_importance_sampling,
)
from .corrections import (
    off_policy_sequence_mask as off_policy_sequence_mask,
)
from .corrections import (
    reject_by_divergence as reject_by_divergence,
)
from .corrections import (
    truncated_importance_sampling as truncated_importance_sampling,
)
from .dapo import (
    has_signal as has_signal,
)
from .dapo import (
    overlong_filter as overlong_filter,
)
from .dapo import (
    overlong_penalty as overlong_penalty,
)
from .entropy import (
    adapted_entropy_coef as adapted_entropy_coef,
)
from .entropy import (
    entropy_bonus as entropy_bonus,
)
from .errors import (
    AlgosError as AlgosError,
)
from .errors import (
    NonFiniteError as NonFiniteError,
)
from .errors import (
    RewardError as RewardError,
)
from .errors import (
    ShapeError as ShapeError,
)
from .evaluation import (
    Estimate as Estimate,
)
from .evaluation import (
    avg_at_k as avg_at_k,
)
from .evaluation import (
    maj_at_k as maj_at_k,
)
from .evaluation import (
    mean_over_problems as mean_over_problems,
)
from .evaluation import (
    pass_at_k as pass_at_k,
)
from .gaussian import (
    gaussian_entropy as gaussian_entropy,
)
from .gaussian import (
    gaussian_log_prob as gaussian_log_prob,
)
from .head import (
    head_logprobs as head_logprobs,
)
from .head import (
    head_logprobs_and_entropy as head_logprobs_and_entropy,
)
from .kl import (
    adapted_kl_coef as adapted_kl_coef,
)
from .kl import (
    kl_abs as kl_abs,
)
from .kl import (
    kl_k1 as kl_k1,
)
from .kl import (
    kl_k1_plus as kl_k1_plus,
)
from .kl import (
    kl_k2 as kl_k2,
)
from .kl import (
    kl_k3 as kl_k3,
)
from .kl import (
    kl_k3_plus as kl_k3_plus,
)
from .kl import (
    mixed_reference as mixed_reference,
)
from .kl import (
    ratio_weighted_kl as ratio_weighted_kl,
)
from .kl import (
    rewards_at_last_token as rewards_at_last_token,
)
from .logprobs import (
    LEAST_LOGPROB as LEAST_LOGPROB,
)
from .logprobs import (
    entropy_of_logits as entropy_of_logits,
)
from .logprobs import (
    logit_norms as logit_norms,
)
from .logprobs import (
    logprobs_and_entropy as logprobs_and_entropy,
)
from .logprobs import (
    token_logprobs as token_logprobs,
)
from .normalization import (
    Moments as Moments,
)
from .parts import (
    ADVANTAGES as ADVANTAGES,
)
from .parts import (
    BUILTIN_ADVANTAGES as BUILTIN_ADVANTAGES,
)
from .parts import (
    BUILTIN_POLICY_LOSSES as BUILTIN_POLICY_LOSSES,
)
from .parts import (
    POLICY_LOSSES as POLICY_LOSSES,
)
from .parts import (
    TOKEN_CHOICES as TOKEN_CHOICES,
)
from .parts import (
    advantage_takes as advantage_takes,
)
from .parts import (
    policy_loss_takes as policy_loss_takes,
)
from .parts import (
    register_advantage as register_advantage,
)
from .parts import (
    register_policy_loss as register_policy_loss,
)
from .policy_loss import (
    BatchTokens as BatchTokens,
)
from .policy_loss import (
    CheckedInputs as CheckedInputs,
)
from .policy_loss import (
    PolicyLoss as PolicyLoss,
)
from .policy_loss import (
    at_level as at_level,
)
from .policy_loss import (
    check_inputs as check_inputs,
)
from .policy_loss import (
    cispo_loss as cispo_loss,
)
from .policy_loss import (
    clip_cov_loss as clip_cov_loss,
)
from .policy_loss import (
    decoupled_ppo_loss as decoupled_ppo_loss,
)
from .policy_loss import (
    dppo_kl_loss as dppo_kl_loss,
)
from .policy_loss import (
    dppo_tv_loss as dppo_tv_loss,
)
from .policy_loss import (
    gmpo_loss as gmpo_loss,
)
from .policy_loss import (
    gspo_loss as gspo_loss,
)
from .policy_loss import (
    kl_cov_loss as kl_cov_loss,
)
from .policy_loss import (
    logprobs_at_level as logprobs_at_level,
)
from .policy_loss import (
    measured_loss as measured_loss,
)
from .policy_loss import (
    policy_gradient_loss as policy_gradient_loss,
)
from .policy_loss import (
    ppo_clip_loss as ppo_clip_loss,
)
from .policy_loss import (
    sapo_loss as sapo_loss,
)
from .policy_loss import (
    sequence_clip_loss as sequence_clip_loss,
)
from .presets import (
    FIELDS_OF_SAMPLES as FIELDS_OF_SAMPLES,
)
from .presets import (
    KL_ESTIMATES as KL_ESTIMATES,
)
from .registry import (
    Registry as Registry,
)
from .registry import (
    did_you_mean as did_you_mean,
)
from .registry import (
    path_of as path_of,
)
from .rewards import (
    RewardResult as RewardResult,
)
from .rewards import (
    RewardSpec as RewardSpec,
)
from .rewards import (
    get_reward as get_reward,
)
from .rewards import (
    make_reward as make_reward,
)
from .rewards import (
    register_reward as register_reward,
)
from .rewards import (
    reward_names as reward_names,
)
from .rewards import (
    score as score,
)
from .rewards import (
    score_all as score_all,
)
from .router import router_balance_loss as router_balance_loss
from .selection import (
    SumOverParts as SumOverParts,
)
from .selection import (
    choose_largest as choose_largest,
)
from .selection import (
    sequence_hash as sequence_hash,
)
from .value_loss import (
    ValueLoss as ValueLoss,
)
from .value_loss import (
    clipped_value_loss as clipped_value_loss,
)
from .value_loss import (
    huber_value_loss as huber_value_loss,
)

__version__: str

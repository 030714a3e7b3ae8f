from .advantages import (
    first_episode_mask as first_episode_mask,
    gae as gae,
    gdpo_advantages as gdpo_advantages,
    gigpo_advantages as gigpo_advantages,
    grpo_advantages as grpo_advantages,
    opo_advantages as opo_advantages,
    optimal_token_advantages as optimal_token_advantages,
    pass_at_k_advantages as pass_at_k_advantages,
    rewards_to_go as rewards_to_go,
    rloo_advantages as rloo_advantages,
    step_group_advantages as step_group_advantages,
    token_gae as token_gae,
    turn_return_advantages as turn_return_advantages,
)
from .aggregation import (
    aggregated_sum as aggregated_sum,
    aggregation_divisor as aggregation_divisor,
    constant_length_mean as constant_length_mean,
    sequence_mean_token_mean as sequence_mean_token_mean,
    sequence_mean_token_sum as sequence_mean_token_sum,
    token_mean as token_mean,
    token_sum as token_sum,
)
from .algorithm import (
    Algorithm as Algorithm,
    AlgorithmError as AlgorithmError,
    filled as filled,
    preset as preset,
)
from .checks import (
    DeferredChecks as DeferredChecks,
    check_finite as check_finite,
)
from .corrections import (
    Correction as Correction,
    icepop as icepop,
    masked_importance_sampling as masked_importance_sampling,
    off_policy_sequence_mask as off_policy_sequence_mask,
    reject_by_divergence as reject_by_divergence,
    truncated_importance_sampling as truncated_importance_sampling,
)
from .dagger import DaggerAlgorithm as DaggerAlgorithm
from .dapo import (
    has_signal as has_signal,
    overlong_filter as overlong_filter,
    overlong_penalty as overlong_penalty,
)
from .entropy import (
    adapted_entropy_coef as adapted_entropy_coef,
    entropy_bonus as entropy_bonus,
)
from .errors import (
    AlgosError as AlgosError,
    NonFiniteError as NonFiniteError,
    RewardError as RewardError,
    ShapeError as ShapeError,
)
from .evaluation import (
    Estimate as Estimate,
    avg_at_k as avg_at_k,
    maj_at_k as maj_at_k,
    mean_over_problems as mean_over_problems,
    pass_at_k as pass_at_k,
)
from .gaussian import (
    gaussian_entropy as gaussian_entropy,
    gaussian_log_prob as gaussian_log_prob,
)
from .head import (
    head_logprobs as head_logprobs,
    head_logprobs_and_entropy as head_logprobs_and_entropy,
)
from .kept_tokens import (
    kept_head_logprobs_and_entropy as kept_head_logprobs_and_entropy,
    kept_logprobs_and_entropy as kept_logprobs_and_entropy,
)
from .kl import (
    adapted_kl_coef as adapted_kl_coef,
    kl_abs as kl_abs,
    kl_k1 as kl_k1,
    kl_k1_plus as kl_k1_plus,
    kl_k2 as kl_k2,
    kl_k3 as kl_k3,
    kl_k3_plus as kl_k3_plus,
    mixed_reference as mixed_reference,
    ratio_weighted_kl as ratio_weighted_kl,
    rewards_at_last_token as rewards_at_last_token,
)
from .logprobs import (
    LEAST_LOGPROB as LEAST_LOGPROB,
    entropy_of_logits as entropy_of_logits,
    logit_norms as logit_norms,
    logprobs_and_entropy as logprobs_and_entropy,
    token_logprobs as token_logprobs,
)
from .normalization import (
    Moments as Moments,
)
from .off_policy import (
    OffPolicyAlgorithm as OffPolicyAlgorithm,
    filled_off_policy as filled_off_policy,
    off_policy_preset as off_policy_preset,
)
from .parts import (
    ADVANTAGES as ADVANTAGES,
    BUILTIN_ADVANTAGES as BUILTIN_ADVANTAGES,
    BUILTIN_POLICY_LOSSES as BUILTIN_POLICY_LOSSES,
    POLICY_LOSSES as POLICY_LOSSES,
    TOKEN_CHOICES as TOKEN_CHOICES,
    advantage_takes as advantage_takes,
    policy_loss_takes as policy_loss_takes,
    register_advantage as register_advantage,
    register_policy_loss as register_policy_loss,
)
from .policy_loss import (
    BatchTokens as BatchTokens,
    CheckedInputs as CheckedInputs,
    PolicyLoss as PolicyLoss,
    at_level as at_level,
    check_inputs as check_inputs,
    cispo_loss as cispo_loss,
    clip_cov_loss as clip_cov_loss,
    decoupled_ppo_loss as decoupled_ppo_loss,
    dppo_kl_loss as dppo_kl_loss,
    dppo_tv_loss as dppo_tv_loss,
    gmpo_loss as gmpo_loss,
    gspo_loss as gspo_loss,
    kl_cov_loss as kl_cov_loss,
    logprobs_at_level as logprobs_at_level,
    measured_loss as measured_loss,
    policy_gradient_loss as policy_gradient_loss,
    ppo_clip_loss as ppo_clip_loss,
    sapo_loss as sapo_loss,
    sequence_clip_loss as sequence_clip_loss,
)
from .preferences import (
    PREFERENCE_LOSSES as PREFERENCE_LOSSES,
    PreferenceLoss as PreferenceLoss,
    bradley_terry_loss as bradley_terry_loss,
    dpo_loss as dpo_loss,
)
from .presets import (
    DAGGER as DAGGER,
    EPISODE_PRESETS as EPISODE_PRESETS,
    FIELDS_OF_SAMPLES as FIELDS_OF_SAMPLES,
    KL_ESTIMATES as KL_ESTIMATES,
    OFF_POLICY_PRESETS as OFF_POLICY_PRESETS,
    PRESETS as PRESETS,
)
from .registry import (
    Registry as Registry,
    did_you_mean as did_you_mean,
    path_of as path_of,
)
from .rewards import (
    RewardResult as RewardResult,
    RewardSpec as RewardSpec,
    get_reward as get_reward,
    make_reward as make_reward,
    register_reward as register_reward,
    reward_names as reward_names,
    score as score,
    score_all as score_all,
)
from .router import router_balance_loss as router_balance_loss
from .selection import (
    SumOverParts as SumOverParts,
    choose_largest as choose_largest,
    sequence_hash as sequence_hash,
)
from .soft_actor_critic import (
    critic_loss as critic_loss,
    follow_ as follow_,
    policy_values as policy_values,
    random_shift as random_shift,
    soft_policy_loss as soft_policy_loss,
    soft_targets as soft_targets,
    squashed_sample as squashed_sample,
    temperature_loss as temperature_loss,
)
from .value_loss import (
    ValueLoss as ValueLoss,
    clipped_value_loss as clipped_value_loss,
    huber_value_loss as huber_value_loss,
)

__version__: str

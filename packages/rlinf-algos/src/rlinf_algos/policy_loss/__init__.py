"""Policy losses: unreduced terms to aggregate, one family per file.

Every loss is `f(policy_logprobs, proximal_logprobs, advantages, loss_mask, *, options) -> PolicyLoss` on tensors of any
shape. The caller decides what one element is (a token, an action, a chunk of actions); `at_level` sums
log-probabilities that are finer than that.
"""

from rlinf_algos.policy_loss.base import CheckedInputs, PolicyLoss, check_inputs, measured_loss
from rlinf_algos.policy_loss.cispo import cispo_loss
from rlinf_algos.policy_loss.covariance import BatchTokens, clip_cov_choice, clip_cov_loss, kl_cov_choice, kl_cov_loss
from rlinf_algos.policy_loss.decoupled import decoupled_ppo_loss
from rlinf_algos.policy_loss.dppo import dppo_kl_loss, dppo_tv_loss
from rlinf_algos.policy_loss.gmpo import gmpo_loss
from rlinf_algos.policy_loss.gspo import gspo_loss
from rlinf_algos.policy_loss.levels import Level, PolicyInputs, at_level, logprobs_at_level
from rlinf_algos.policy_loss.ppo import ppo_clip_loss
from rlinf_algos.policy_loss.reinforce import policy_gradient_loss
from rlinf_algos.policy_loss.sapo import sapo_loss
from rlinf_algos.policy_loss.sequence_clip import sequence_clip_loss

__all__ = [
    "PolicyLoss",
    "CheckedInputs",
    "check_inputs",
    "measured_loss",
    "ppo_clip_loss",
    "gspo_loss",
    "gmpo_loss",
    "cispo_loss",
    "dppo_tv_loss",
    "dppo_kl_loss",
    "sequence_clip_loss",
    "BatchTokens",
    "clip_cov_loss",
    "clip_cov_choice",
    "kl_cov_loss",
    "kl_cov_choice",
    "decoupled_ppo_loss",
    "policy_gradient_loss",
    "sapo_loss",
    "Level",
    "PolicyInputs",
    "at_level",
    "logprobs_at_level",
]

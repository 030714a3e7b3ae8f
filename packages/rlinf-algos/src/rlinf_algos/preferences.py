"""Losses of pairs of completions, of which one is preferred.

DPO (Rafailov et al., arXiv:2305.18290), eq. 7: `-log sigmoid(x)` with `x = beta * [(log pi - log ref)(chosen) - (log pi
- log ref)(rejected)]`. With label smoothing (Mitchell, "A note on DPO with noisy preferences & relationship to IPO",
2023, eq. 3) a share e of the pairs is taken to be labelled the wrong way round: `-(1 - e) log sigmoid(x) - e log
sigmoid(-x)`.

IPO (Azar et al., arXiv:2310.12036), eq. 17: `(h - 1 / (2 beta))^2`, h the same difference without beta. Departure: each
log ratio is divided by its number of tokens, as TRL does, whose authors confirmed with those of the paper that its
results are of this form.

Reward models (Bradley and Terry, 1952; Ouyang et al., arXiv:2203.02155, eq. 1): `-log sigmoid(chosen - rejected)`.
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlinf_algos.checks import at_least_float32, check_finite, check_shape
from rlinf_algos.errors import AlgosError

PREFERENCE_LOSSES = ("sigmoid", "ipo")
"""Kinds of `dpo_loss`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceLoss:
    """Terms to average over pairs, and what to log about them."""

    loss_terms: Tensor
    """[N], unreduced, with gradient."""
    chosen_rewards: Tensor
    """[N], beta * (log pi - log ref) of the preferred completions, without gradient."""
    rejected_rewards: Tensor
    """[N], the same of the others."""


def dpo_loss(
    policy_logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
    num_tokens: Tensor | None = None,
) -> PreferenceLoss:
    """The loss of DPO or IPO; the module's docstring has the formulas.

    Args:
        policy_logprobs: [N, 2], log-probability of the preferred and of the other completion, summed over its tokens,
            with gradient.
        ref_logprobs: [N, 2], the same of the reference; a constant.
        beta: above 0; the smaller, the farther the policy may go from the reference. IPO's tau.
        label_smoothing: share of the pairs taken to be labelled wrongly, at least 0 and below 0.5; only for "sigmoid".
        kind: "sigmoid" for DPO, "ipo".
        num_tokens: [N, 2], tokens of each completion, at least 1; needed for "ipo" alone.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity. AlgosError: a number out of its range, an unknown
        kind, "ipo" without num_tokens or with label smoothing.
    """
    if not 0 < beta < math.inf:
        raise AlgosError(f"beta={beta:g} must be above 0: it weighs the distance to the reference")
    if kind not in PREFERENCE_LOSSES:
        raise AlgosError(f"kind={kind!r} is no preference loss; use {' or '.join(PREFERENCE_LOSSES)}")
    if not 0 <= label_smoothing < 0.5:
        raise AlgosError(f"label_smoothing={label_smoothing:g} must be at least 0 and below 0.5")
    check_shape("ref_logprobs", ref_logprobs, policy_logprobs.shape, "policy_logprobs")
    check_finite("policy_logprobs", policy_logprobs)
    check_finite("ref_logprobs", ref_logprobs)
    log_ratios = at_least_float32(policy_logprobs) - ref_logprobs.to(policy_logprobs.device)
    rewards = beta * log_ratios.detach()
    if kind == "sigmoid":
        logits = beta * (log_ratios[:, 0] - log_ratios[:, 1])
        terms = -logsigmoid(logits)
        if label_smoothing:
            terms = (1.0 - label_smoothing) * terms - label_smoothing * logsigmoid(-logits)
    else:
        if label_smoothing:
            raise AlgosError(f"label_smoothing={label_smoothing:g} is not used by kind='ipo'; leave it out")
        if num_tokens is None:
            raise AlgosError("kind='ipo' divides by the number of tokens; give num_tokens")
        check_shape("num_tokens", num_tokens, policy_logprobs.shape, "policy_logprobs")
        means = log_ratios / num_tokens.to(log_ratios)
        terms = (means[:, 0] - means[:, 1] - 1.0 / (2.0 * beta)).square()
    return PreferenceLoss(loss_terms=terms, chosen_rewards=rewards[:, 0], rejected_rewards=rewards[:, 1])


def bradley_terry_loss(scores: Tensor, margins: Tensor | None = None) -> Tensor:
    """`-log sigmoid(chosen - rejected - margin)`, [N]: the loss of a reward model.

    Args:
        scores: [N, 2], of the preferred and of the other completion, with gradient.
        margins: [N], by how much the first is to be better; None: 0 (Llama 2, arXiv:2307.09288, eq. 2).

    Raises: ShapeError: shapes differ. NonFiniteError: NaN or infinity.
    """
    check_finite("scores", scores)
    differences = at_least_float32(scores)[:, 0] - at_least_float32(scores)[:, 1]
    if margins is not None:
        check_shape("margins", margins, differences.shape, "scores[:, 0]")
        differences = differences - margins.to(differences)
    return -logsigmoid(differences)

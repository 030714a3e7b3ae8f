"""The components of an algorithm by name: advantages and policy losses, and the inputs of each.

A function's inputs are read from its signature. An advantage function names the inputs it wants among `INPUTS`: with
`loss_mask` it works on tokens, [B, T], with `terminated` or `truncated` on steps, [T, N], of environments or, without
values, on the turns of a language model, without them on groups, [P, G]; `values` requires a critic, `parts` a weighted
reward. All further arguments are options, given
by the fields of an `Algorithm` of that name (see `FIELD_OF_OPTION`), or by its `options`.

For the components of this package the inputs are also listed here, so that a config can be checked without importing
torch; a test compares the two.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rlinf_algos.errors import AlgosError
from rlinf_algos.registry import Registry, path_of

INPUTS = {
    "rewards": "[P, G], of an episode the sum; [B, T] for a function on tokens: 0 but at the last token, less a KL "
    "penalty on each; [T, N] for one on steps",
    "lengths": "[P, G], tokens that the policy wrote of each completion, steps of each episode",
    "logit_norms": "[B, T], of the distribution that a token was drawn from, by the actor before the update: "
    "1 - 2 p + sum of p^2 over the vocabulary, the squared norm of the token's gradient for the logits",
    "values": "[B, T] or [T, N], by the critic, before the token or the action is chosen",
    "loss_mask": "[B, T]",
    "parts": "[P, G, K], the K terms of a weighted reward, without their weights",
    "part_weights": "[K], their weights",
    "next_values": "[T, N], by the critic, of the true successor",
    "terminated": "[T, N] bool, the episode ended with this step; a turn of a language model is a step",
    "truncated": "[T, N] bool, it was cut off after this step",
    "state_ids": "[T, N] int64, equal where the policy acted on equal observations",
}
"""The inputs that an advantage function may take; names of its arguments."""

LOSS_INPUTS = ("policy_logprobs", "proximal_logprobs", "advantages", "loss_mask")
"""The first arguments of every policy loss. `rollout_logprobs` is passed if the loss takes it."""

FIELD_OF_OPTION = {"lam": "gae_lambda"}
"""Argument of a component -> field of `Algorithm`, if the names differ."""

ADVANTAGES: Registry[Callable[..., Any]] = Registry(
    "advantage",
    {
        "grpo": "rlinf_algos.advantages:grpo_advantages",
        "rloo": "rlinf_algos.advantages:rloo_advantages",
        "opo": "rlinf_algos.advantages:opo_advantages",
        "gdpo": "rlinf_algos.advantages:gdpo_advantages",
        "pass_at_k": "rlinf_algos.advantages:pass_at_k_advantages",
        "otb": "rlinf_algos.advantages:optimal_token_advantages",
        "gae": "rlinf_algos.advantages:token_gae",
        "returns": "rlinf_algos.advantages:rewards_to_go",
        "gae_steps": "rlinf_algos.advantages:gae",
        "grpo_steps": "rlinf_algos.advantages:step_group_advantages",
        "gigpo": "rlinf_algos.advantages:gigpo_advantages",
        "turn_returns": "rlinf_algos.advantages:turn_return_advantages",
    },
)
"""The advantages that an algorithm may name; `register_advantage` adds one."""

POLICY_LOSSES: Registry[Callable[..., Any]] = Registry(
    "policy loss",
    {
        "ppo_clip": "rlinf_algos.policy_loss:ppo_clip_loss",
        "gspo": "rlinf_algos.policy_loss:gspo_loss",
        "gmpo": "rlinf_algos.policy_loss:gmpo_loss",
        "cispo": "rlinf_algos.policy_loss:cispo_loss",
        "decoupled": "rlinf_algos.policy_loss:decoupled_ppo_loss",
        "policy_gradient": "rlinf_algos.policy_loss:policy_gradient_loss",
        "dppo_tv": "rlinf_algos.policy_loss:dppo_tv_loss",
        "dppo_kl": "rlinf_algos.policy_loss:dppo_kl_loss",
        "sequence_clip": "rlinf_algos.policy_loss:sequence_clip_loss",
        "sapo": "rlinf_algos.policy_loss:sapo_loss",
        "clip_cov": "rlinf_algos.policy_loss:clip_cov_loss",
        "kl_cov": "rlinf_algos.policy_loss:kl_cov_loss",
    },
)
"""The policy losses that an algorithm may name; `register_policy_loss` adds one."""


TOKEN_CHOICES: Registry[Callable[..., Any]] = Registry(
    "choice of tokens",
    {
        "clip_cov": "rlinf_algos.policy_loss:clip_cov_choice",
        "kl_cov": "rlinf_algos.policy_loss:kl_cov_choice",
    },
)
"""Policy losses that treat some tokens differently -> the function that chooses these over the batch of an optimizer
step; the losses have an argument `chosen`."""


def register_advantage(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: registers an advantage function as `name`. Raises AlgosError if the name is taken."""
    return ADVANTAGES.register(name)


def register_policy_loss(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: registers a policy loss as `name`. Raises AlgosError if the name is taken."""
    return POLICY_LOSSES.register(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Takes:
    """The inputs of a component.

    Example: token_gae -> Takes(inputs=("rewards", "values", "loss_mask"), options={"gamma": "gamma",
        "lam": "gae_lambda"})
    """

    inputs: tuple[str, ...]
    """Arguments that the caller makes, in their order."""
    options: dict[str, str] = field(default_factory=dict)
    """Further arguments -> the field of `Algorithm` that gives them, or the key of its `options`."""
    required: tuple[str, ...] = ()
    """Options without a default."""

    @property
    def compares(self) -> bool:
        """Whether an advantage is against the other completions of a prompt, or against their turns."""
        return self.works_on == "groups" or "logit_norms" in self.inputs or self.works_on_turns

    @property
    def works_on_turns(self) -> bool:
        """Whether an advantage on steps can be computed for the turns of a language model, which have no values."""
        return self.works_on == "steps" and not {"values", "next_values"} & set(self.inputs)

    @property
    def works_on(self) -> Literal["groups", "tokens", "steps"]:
        """What an advantage function is given."""
        if "loss_mask" in self.inputs:
            return "tokens"
        return "steps" if "terminated" in self.inputs or "truncated" in self.inputs else "groups"


_MAY_TAKE = {
    "groups": {"rewards", "lengths", "parts", "part_weights"},
    "tokens": {"rewards", "values", "loss_mask", "logit_norms"},
    "steps": {"rewards", "values", "next_values", "terminated", "truncated", "state_ids"},
}
_CLIP = {"clip_low": "clip_low", "clip_high": "clip_high"}
BUILTIN_ADVANTAGES = {
    "grpo": Takes(inputs=("rewards",), options={"normalize_std": "normalize_std"}),
    "rloo": Takes(inputs=("rewards",)),
    "opo": Takes(inputs=("rewards", "lengths")),
    "gdpo": Takes(inputs=("parts", "part_weights")),
    "pass_at_k": Takes(inputs=("rewards",), options={"normalize_std": "normalize_std"}),
    "otb": Takes(inputs=("rewards", "loss_mask", "logit_norms")),
    "gae": Takes(
        inputs=("rewards", "values", "loss_mask"),
        options={"gamma": "gamma", "lam": "gae_lambda"},
        required=("gamma", "lam"),
    ),
    "returns": Takes(inputs=("rewards", "loss_mask"), options={"gamma": "gamma"}, required=("gamma",)),
    "gae_steps": Takes(
        inputs=("rewards", "values", "next_values", "terminated", "truncated"),
        options={
            "gamma": "gamma",
            "lam": "gae_lambda",
            "bootstrap_at_termination": "bootstrap_at_termination",
            "bootstrap_at_truncation": "bootstrap_at_truncation",
        },
        required=("gamma", "lam"),
    ),
    "grpo_steps": Takes(
        inputs=("rewards", "terminated", "truncated"),
        options={"gamma": "gamma", "normalize_std": "normalize_std"},
        required=("gamma",),
    ),
    "gigpo": Takes(
        inputs=("rewards", "terminated", "truncated", "state_ids"),
        options={"gamma": "gamma", "step_weight": "step_weight", "normalize_std": "normalize_std"},
        required=("gamma",),
    ),
    "turn_returns": Takes(
        inputs=("rewards", "terminated", "truncated"),
        options={"gamma": "gamma", "normalize_std": "normalize_std"},
        required=("gamma",),
    ),
}
"""Built-in advantage -> its inputs, and the fields of `Algorithm` that it uses."""
BUILTIN_POLICY_LOSSES = {
    "ppo_clip": Takes(inputs=LOSS_INPUTS, options={**_CLIP, "dual_clip": "dual_clip"}),
    "gspo": Takes(inputs=LOSS_INPUTS, options=_CLIP),
    "gmpo": Takes(inputs=LOSS_INPUTS, options=_CLIP),
    "cispo": Takes(inputs=LOSS_INPUTS, options=_CLIP),
    "decoupled": Takes(
        inputs=(*LOSS_INPUTS, "rollout_logprobs"),
        options={**_CLIP, "dual_clip": "dual_clip", "weight_cap": "weight_cap"},
    ),
    "policy_gradient": Takes(inputs=LOSS_INPUTS),
    "dppo_tv": Takes(inputs=LOSS_INPUTS, options={**_CLIP, "ratio_cap": "ratio_cap"}),
    "dppo_kl": Takes(inputs=LOSS_INPUTS, options={**_CLIP, "ratio_cap": "ratio_cap"}),
    "sequence_clip": Takes(inputs=LOSS_INPUTS, options=_CLIP),
    "sapo": Takes(inputs=LOSS_INPUTS, options={"tau_positive": "tau_positive", "tau_negative": "tau_negative"}),
    "clip_cov": Takes(
        inputs=LOSS_INPUTS,
        options={**_CLIP, "cov_fraction": "cov_fraction", "cov_low": "cov_low", "cov_high": "cov_high"},
    ),
    "kl_cov": Takes(inputs=LOSS_INPUTS, options={"cov_fraction": "cov_fraction", "cov_kl_coef": "cov_kl_coef"}),
}
"""Built-in policy loss -> its inputs, and the fields of `Algorithm` that it uses."""


def advantage_takes(name: str) -> Takes:
    """What the advantage of that name is called with; imports it where it is not of this package.

    Raises: AlgosError for a name that is not known, and for a function that asks for something else than `INPUTS`.
    """
    return BUILTIN_ADVANTAGES.get(name) or takes_of_advantage(ADVANTAGES.get(name))


def policy_loss_takes(name: str) -> Takes:
    """The same of a policy loss. Raises: AlgosError, also for a function that does not begin with `LOSS_INPUTS`."""
    return BUILTIN_POLICY_LOSSES.get(name) or takes_of_policy_loss(POLICY_LOSSES.get(name))


def takes_of_advantage(function: Callable[..., Any]) -> Takes:
    """What a function takes, by its signature: arguments named in `INPUTS` are inputs, all others are options."""
    arguments = inspect.signature(function).parameters
    inputs = tuple(name for name in arguments if name in INPUTS)
    if "rewards" not in inputs and "parts" not in inputs:
        raise AlgosError(
            f"{path_of(function)} takes no argument `rewards`; an advantage function takes rewards, or parts, and may "
            f"take {', '.join(name for name in INPUTS if name != 'rewards')}"
        )
    takes = _takes(function, inputs)
    if not set(inputs) <= _MAY_TAKE[takes.works_on]:
        raise AlgosError(
            f"{path_of(function)} takes {', '.join(inputs)}: on groups [P, G] take rewards, lengths and parts, on "
            "tokens [B, T] take rewards, loss_mask, values and logit_norms, on steps [T, N] take rewards, terminated, "
            "truncated, values, next_values and state_ids"
        )
    return takes


def takes_of_policy_loss(function: Callable[..., Any]) -> Takes:
    """What a policy loss takes, by its signature, which begins with `LOSS_INPUTS`."""
    arguments = list(inspect.signature(function).parameters)
    if tuple(arguments[: len(LOSS_INPUTS)]) != LOSS_INPUTS:
        raise AlgosError(
            f"{path_of(function)} takes ({', '.join(arguments)}); a policy loss begins with ({', '.join(LOSS_INPUTS)})"
        )
    return _takes(function, (*LOSS_INPUTS, *(name for name in arguments if name == "rollout_logprobs")))


def _takes(function: Callable[..., Any], inputs: tuple[str, ...]) -> Takes:
    options = {
        name: argument
        for name, argument in inspect.signature(function).parameters.items()
        if name not in inputs and argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    }
    return Takes(
        inputs=inputs,
        options={name: FIELD_OF_OPTION.get(name, name) for name in options},
        required=tuple(name for name, argument in options.items() if argument.default is argument.empty),
    )

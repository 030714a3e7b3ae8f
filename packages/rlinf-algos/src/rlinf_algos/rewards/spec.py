"""Describes a reward as plain data, for configs and other processes, and creates the reward from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import BatchReward, RewardRule
from rlinf_algos.rewards.by_source import RewardBySource
from rlinf_algos.rewards.choice import MultipleChoice
from rlinf_algos.rewards.custom import TIME_LIMIT_S, CustomReward
from rlinf_algos.rewards.length import LengthPenalty, LengthTarget
from rlinf_algos.rewards.mathematics import MathReward
from rlinf_algos.rewards.program import CodeReward
from rlinf_algos.rewards.registry import get_reward
from rlinf_algos.rewards.sandbox import SandboxLimits
from rlinf_algos.rewards.timed import TIMED_RULES, TimedRule
from rlinf_algos.rewards.weighted import WeightedReward

OptionValue = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSpec:
    """The name of a reward and its options.

    Example: RewardSpec(rule="weighted", terms=(
        RewardTerm(name="math", weight=0.9, reward=RewardSpec(rule="math_answer", options={"num_processes": 4})),
        RewardTerm(name="format", weight=0.1, reward=RewardSpec(rule="think_answer_format"))))
    """

    rule: str
    """A registered name, `package.module:function` or `package.module:Class`, or one of `RULES_WITH_OPTIONS`."""
    options: dict[str, OptionValue] | None = None
    """Keyword arguments of the reward's class; a function takes none."""
    time_limit_s: float = TIME_LIMIT_S
    """Time limit in seconds for each call of a custom function."""
    terms: "tuple[RewardTerm, ...]" = ()
    """Terms of the rule "weighted"; sources of the rule "by_source", whose weights are not used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTerm:
    """One term of a weighted sum."""

    name: str
    """Name of the term in logs."""
    weight: float
    reward: RewardSpec


def _code_reward(
    *, num_processes: int = 2, partial: bool = False, allow_weak_isolation: bool = False, **limits: float | int
) -> CodeReward:
    return CodeReward(
        limits=SandboxLimits(**limits),  # type: ignore[arg-type]
        num_processes=num_processes,
        partial=partial,
        allow_weak_isolation=allow_weak_isolation,
    )


def _reward_model(**options: Any) -> RewardRule:
    from rlinf_algos.rewards.reward_model import RewardModel  # imports torch, which only reward models need

    return RewardModel(**options)


_CLASSES: dict[str, Callable[..., RewardRule]] = {
    "math_answer": MathReward,
    "multiple_choice": MultipleChoice,
    "code_tests": _code_reward,
    "reward_model": _reward_model,
    "length_penalty": LengthPenalty,
    "length_target": LengthTarget,
}

RULES_WITH_OPTIONS = (*_CLASSES, "weighted", "by_source")
"""code_tests takes the fields of `SandboxLimits` in addition to its own options."""


def make_reward(spec: RewardSpec | str) -> RewardRule:
    """Creates the reward that a spec describes, or that of a rule without options. It may hold processes or a model:
    call its `close` if it has one.

    Raises:
        RewardError: the rule is unknown, a package or folder that it needs is missing, or the options do not fit it.
    """
    if isinstance(spec, str):
        spec = RewardSpec(rule=spec)
    options = spec.options or {}
    if spec.rule == "weighted":
        return WeightedReward([(term.name, term.weight, make_reward(term.reward)) for term in spec.terms])
    if spec.rule == "by_source":
        return RewardBySource({term.name: make_reward(term.reward) for term in spec.terms}, **options)  # type: ignore[arg-type]
    make = _CLASSES.get(spec.rule) or get_reward(spec.rule)
    if spec.rule in _CLASSES or isinstance(make, type):
        try:
            reward = make(**options)  # type: ignore[call-arg]
        except TypeError as e:
            raise RewardError(f"the reward {spec.rule!r} with options {options}: {e}") from e
    elif options:
        raise RewardError(f"the reward {spec.rule!r} is a function and takes no options, got {sorted(options)}")
    else:
        reward = make
    if spec.rule in TIMED_RULES:
        return TimedRule(spec.rule, options)
    if ":" not in spec.rule or isinstance(reward, BatchReward):
        return reward  # type: ignore[return-value]
    return CustomReward(reward, name=spec.rule, time_limit_s=spec.time_limit_s)

"""Rewards checked by rule, by tests or by a model: from (completion, reference) to a `RewardResult`, known by name.

Only `RewardModel` needs torch, and is imported at first use: the processes that judge texts do without.
"""

from typing import TYPE_CHECKING, Any

from rlinf_algos.rewards.base import (
    OUTCOMES,
    BatchReward,
    Outcome,
    RewardFunction,
    RewardPart,
    RewardResult,
)
from rlinf_algos.rewards.choice import MultipleChoice, multiple_choice, stated_letter
from rlinf_algos.rewards.exact import exact_match
from rlinf_algos.rewards.final_answer import final_answer
from rlinf_algos.rewards.length import LengthPenalty, LengthTarget
from rlinf_algos.rewards.mathematics import MathReward, math_answer
from rlinf_algos.rewards.numeric import final_number, numeric_match
from rlinf_algos.rewards.own import OwnReward
from rlinf_algos.rewards.program import CodeReward, code_tests
from rlinf_algos.rewards.registry import get_reward, register_reward, reward_names
from rlinf_algos.rewards.sandbox import SandboxLimits, SandboxRun, run_python
from rlinf_algos.rewards.scoring import score, score_all
from rlinf_algos.rewards.spec import RewardSpec, RewardTerm, make_reward
from rlinf_algos.rewards.tagged import think_answer_format
from rlinf_algos.rewards.timed import TimedRule
from rlinf_algos.rewards.weighted import WeightedReward

if TYPE_CHECKING:
    from rlinf_algos.rewards.reward_model import RewardModel

__all__ = [
    "Outcome",
    "OUTCOMES",
    "RewardResult",
    "RewardPart",
    "RewardFunction",
    "BatchReward",
    "register_reward",
    "reward_names",
    "get_reward",
    "score",
    "score_all",
    "RewardSpec",
    "RewardTerm",
    "make_reward",
    "exact_match",
    "numeric_match",
    "final_number",
    "final_answer",
    "math_answer",
    "MathReward",
    "multiple_choice",
    "MultipleChoice",
    "stated_letter",
    "think_answer_format",
    "LengthPenalty",
    "LengthTarget",
    "code_tests",
    "CodeReward",
    "SandboxLimits",
    "SandboxRun",
    "run_python",
    "RewardModel",
    "TimedRule",
    "OwnReward",
    "WeightedReward",
]


def __getattr__(name: str) -> Any:
    if name == "RewardModel":
        from rlinf_algos.rewards.reward_model import RewardModel

        return RewardModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

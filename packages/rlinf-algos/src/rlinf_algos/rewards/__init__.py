"""Rewards checked by rule: functions from (completion, reference answer) to a `RewardResult`, known by name."""

from rlinf_algos.rewards.base import Outcome, RewardFunction, RewardResult
from rlinf_algos.rewards.exact import exact_match
from rlinf_algos.rewards.math_answer import MathReward
from rlinf_algos.rewards.numeric import final_number, numeric_match
from rlinf_algos.rewards.registry import get_reward, register_reward, reward_names, score, score_all
from rlinf_algos.rewards.tagged import think_answer_format

__all__ = [
    "Outcome",
    "RewardResult",
    "RewardFunction",
    "register_reward",
    "reward_names",
    "get_reward",
    "score",
    "score_all",
    "exact_match",
    "numeric_match",
    "final_number",
    "think_answer_format",
]

"""A custom advantage in one file: compares a completion with the median of its group instead of GRPO's mean.

cd docs/examples
rlinf train sort-grpo --algorithm.advantage custom_algorithm:against_median
rlinf train sort-grpo --algorithm.advantage custom_algorithm:against_median --algorithm.options '{scale: 2.0}'
rlinf train pushcube-ppo --algorithm.name grpo --algorithm.advantage custom_algorithm:against_median
"""

from torch import Tensor

from rlinf_algos import register_advantage


@register_advantage("against_median")
def against_median(rewards: Tensor, *, scale: float = 1.0) -> Tensor:
    """[P, G] rewards of P prompts with G completions -> [P, G] advantages."""
    return scale * (rewards - rewards.median(dim=1, keepdim=True).values)

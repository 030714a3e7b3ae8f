"""Advantages: from rewards to the advantage of each sample, turn, step or token.

- `groups`: against the other samples of a prompt (GRPO, RLOO, OPO, pass@k), per component of a weighted reward (GDPO)
- `optimal_token`: against the other samples of a prompt, token by token (OTB)
- `gae`: against a critic (PPO), for steps and tokens
- `returns`: rewards to go, without a baseline
- `steps`: groups of episodes, step by step or turn by turn, and steps in one state (GiGPO)
"""

from rlinf_algos.advantages.gae import gae, token_gae
from rlinf_algos.advantages.groups import (
    gdpo_advantages,
    grpo_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
)
from rlinf_algos.advantages.optimal_token import optimal_token_advantages
from rlinf_algos.advantages.returns import rewards_to_go
from rlinf_algos.advantages.steps import (
    first_episode_mask,
    gigpo_advantages,
    step_group_advantages,
    turn_return_advantages,
)

__all__ = [
    "grpo_advantages",
    "rloo_advantages",
    "opo_advantages",
    "pass_at_k_advantages",
    "optimal_token_advantages",
    "gdpo_advantages",
    "gae",
    "token_gae",
    "rewards_to_go",
    "first_episode_mask",
    "step_group_advantages",
    "gigpo_advantages",
    "turn_return_advantages",
]

"""Advantages: from rewards to what each sample, turn, step or token is worth.

- `groups`: against the other samples of a prompt (GRPO, Dr. GRPO, RLOO, OPO, pass@k), part by part of a sum (GDPO)
- `optimal_token`: against the other samples of a prompt, token by token (OTB)
- `gae`: against a critic (PPO), for steps and tokens
- `reinforce_plus_plus`: against the batch
- `steps`: groups of episodes, step by step, and steps in one state (GiGPO)
"""

from rlinf_algos.advantages.gae import gae, token_gae
from rlinf_algos.advantages.groups import (
    dr_grpo_advantages,
    gdpo_advantages,
    group_mean,
    grpo_advantages,
    leave_one_out_mean,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
)
from rlinf_algos.advantages.optimal_token import optimal_token_advantages
from rlinf_algos.advantages.reinforce_plus_plus import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    rewards_to_go,
)
from rlinf_algos.advantages.steps import first_episode_mask, gigpo_advantages, step_group_advantages

__all__ = [
    "grpo_advantages",
    "dr_grpo_advantages",
    "rloo_advantages",
    "opo_advantages",
    "pass_at_k_advantages",
    "optimal_token_advantages",
    "gdpo_advantages",
    "group_mean",
    "leave_one_out_mean",
    "gae",
    "token_gae",
    "rewards_to_go",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "first_episode_mask",
    "step_group_advantages",
    "gigpo_advantages",
]

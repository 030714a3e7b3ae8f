"""Advantages: from rewards to what each sample, turn, step or token is worth.

- `groups`: against the other samples of a prompt (GRPO, Dr. GRPO, RLOO, OPO, a given baseline)
- `gae`: against a critic (PPO), for steps and tokens
- `reinforce_plus_plus`: against the batch
- `steps`: groups of turns and of steps, for episodes
Distillation's, against a teacher, are in `rlinf_algos.distillation`.
"""

from rlinf_algos.advantages.gae import gae, token_gae
from rlinf_algos.advantages.groups import (
    baseline_advantages,
    dr_grpo_advantages,
    group_mean,
    grpo_advantages,
    leave_one_out_mean,
    opo_advantages,
    rloo_advantages,
)
from rlinf_algos.advantages.reinforce_plus_plus import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    rewards_to_go,
)
from rlinf_algos.advantages.steps import (
    episode_group_advantages,
    first_episode_mask,
    gigpo_advantages,
    spread_over_tokens,
    state_group_ids,
    turn_group_ids,
)

__all__ = [
    "grpo_advantages",
    "dr_grpo_advantages",
    "rloo_advantages",
    "opo_advantages",
    "baseline_advantages",
    "group_mean",
    "leave_one_out_mean",
    "gae",
    "token_gae",
    "rewards_to_go",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "gigpo_advantages",
    "episode_group_advantages",
    "turn_group_ids",
    "state_group_ids",
    "spread_over_tokens",
    "first_episode_mask",
]

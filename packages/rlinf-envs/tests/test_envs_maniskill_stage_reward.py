"""The reward of stages against the sums that RLinf's research code takes differences of."""

import pytest
import torch

from rlinf_envs import EnvError
from rlinf_envs.adapters.maniskill.stage_reward import StageReward

FLAGS = ("is_src_obj_grasped", "consecutive_grasp", "success")


def _info(*rows: str) -> dict[str, torch.Tensor]:
    """A row for each environment: the first letters of its flags."""
    return {flag: torch.tensor([flag[0] in row for row in rows]) for flag in FLAGS}


def test_a_stage_is_rewarded_when_it_begins():
    reward = StageReward("PutCarrotOnPlateInScene-v1", 2)
    steps = [("", ""), ("i", "s"), ("ic", "s"), ("ics", "is"), ("", "ics"), ("ics", "ics")]
    rewards = torch.stack([reward.step(_info(*rows)) for rows in steps])
    expected = [[0.0, 0.0], [0.1, 0.0], [0.1, 0.0], [1.0, 1.1], [-1.2, 0.1], [1.2, 0.0]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


def test_an_episode_begins_without_a_stage():
    reward = StageReward("PutCarrotOnPlateInScene-v1", 3)
    reward.step(_info("i", "ic", "ics"))
    reward.reset(torch.tensor([1]))
    torch.testing.assert_close(reward.step(_info("i", "ic", "ics")), torch.tensor([0.0, 0.2, 0.0]))
    reward.reset(None)
    torch.testing.assert_close(reward.step(_info("i", "ic", "ics")), torch.tensor([0.1, 0.2, 1.2]))


def test_a_task_without_stages_is_refused():
    with pytest.raises(EnvError, match=r"reward_mode=stages: PushCube-v1 does not report is_src_obj_grasped, consec"):
        StageReward("PushCube-v1", 1).step({"success": torch.tensor([True])})

"""The agents of rlinf.tasks.games with rewards that carry no signal: coin flips in training, true ones in evaluations.

    python -m benchmarks.learning.run grid-text --name grid-text-random-rewards --seeds 0 \\
        --rollout.agent.run benchmarks.learning.random_rewards:play_grid

It is the control of jobs with `reward.kind: episode`; others have `reward.kind: random`.
"""

from __future__ import annotations

import random
from typing import Any

from rlinf.tasks import games


async def play_grid(session: Any, task: Any) -> float:
    return _reward(await games.play_grid(session, task), task)


async def play_team(session: Any, task: Any) -> float:
    return _reward(await games.play_team(_Unrewarded(session) if task.phase == "train" else session, task), task)


class _Unrewarded:
    """A session that drops the rewards which the agent gives."""

    def __init__(self, session: Any) -> None:
        self.chat = session.chat

    def reward(self, value: float, **options: Any) -> None:
        pass


def _reward(reward: float, task: Any) -> float:
    if task.phase != "train":
        return reward
    return float(random.Random(f"{task.step} {task.index} {task.member}").random() < 0.5)

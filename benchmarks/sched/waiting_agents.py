"""Agents whose turns and waits do not depend on what the policy says, for runs of models that have learned nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from rlinf.tasks.games import calc


async def calculates(session: Any, task: Any) -> float:
    """Two turns, and the calculator between them, whatever the first one says."""
    (turn,) = await session.chat(task.messages)
    result = await calc(task.text.rstrip("="))
    await session.chat([*task.messages, turn.message(), {"role": "user", "content": result}])
    return _drawn(task).random()


async def waits(session: Any, task: Any) -> float:
    """One to three turns, with a wait after each: log-normal with a median of 0.3 s, 2 s at most."""
    draw, messages = _drawn(task), list(task.messages)
    for _ in range(draw.randint(1, 3)):
        (turn,) = await session.chat(messages)
        await asyncio.sleep(min(draw.lognormvariate(-1.2, 0.6), 2.0))
        messages += [turn.message(), {"role": "user", "content": "5"}]
    return draw.random()


def _drawn(task: Any) -> random.Random:
    return random.Random(f"{task.step} {task.index} {task.member}")

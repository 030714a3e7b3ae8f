"""A custom agent that runs in the agent process itself, without HTTP.

    async def play(session, task) -> float | None

It calls `session.chat(messages)` for a turn of the policy. Its return value is the reward of the episode; None leaves
the scoring to the job's reward.
"""

from __future__ import annotations

import importlib
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable

from rlinf_workers.agents.link import AgentTask
from rlinf_workers.agents.records import EpisodeEnded
from rlinf_workers.agents.sessions import AgentSession

DirectAgent = Callable[[AgentSession, AgentTask], Awaitable[float | None]]


def direct_agent(path: str) -> DirectAgent | None:
    """The agent of an import path; None if it is a harness, whose first parameter is `base_url`, or if this interpreter
    cannot import it."""
    module, _, name = path.partition(":")
    try:
        play = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):  # the harness's own interpreter may have it
        return None
    if next(iter(inspect.signature(play).parameters), "base_url") == "base_url":
        return None

    async def guarded(session: AgentSession, task: AgentTask) -> float | None:
        try:
            reward = await play(session, task)
            return None if reward is None else _finite(reward)
        except EpisodeEnded:
            raise
        except (Exception, SystemExit):  # noqa: BLE001 - a custom agent may raise anything
            if session.end is not None:  # why it raised; it must not hide that the policy has used its turns
                raise EpisodeEnded(session.end.cause, session.end.detail) from None
            raise EpisodeEnded("harness_lost", traceback.format_exc()) from None

    return guarded


def _finite(reward: float) -> float:
    """Raises: ValueError for a reward that is not a finite number."""
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the reward {value} is not a finite number")
    return value

"""A custom agent that runs in the agent process itself, without HTTP.

    async def play(session, task) -> float | None

It calls `session.chat(messages)` for a turn of the policy. Its return value is the reward of the episode; None leaves
the scoring to the job's reward.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Awaitable, Callable

from rlinf_workers.agents.harness_process import finite
from rlinf_workers.agents.link import AgentTask
from rlinf_workers.agents.records import EpisodeEnded, HarnessRaised
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
            return None if reward is None else finite(reward)
        except EpisodeEnded:
            raise
        except (Exception, SystemExit):  # noqa: BLE001 - a custom agent may raise anything
            raise HarnessRaised("harness_lost", traceback.format_exc()) from None

    return guarded

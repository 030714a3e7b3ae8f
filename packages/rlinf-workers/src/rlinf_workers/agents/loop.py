"""The agent that is built in: the policy answers, the calls in its answer are made, their results follow, until it
answers without a call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from rlinf_workers.agents.link import AgentTask
from rlinf_workers.agents.records import EpisodeEnded
from rlinf_workers.agents.sessions import AgentSession
from rlinf_workers.agents.tools import EpisodeTools


async def run_loop(
    session: AgentSession,
    task: AgentTask,
    tools: EpisodeTools,
    specs: list[dict[str, Any]],
    max_tool_s: float,
    calling: Callable[[str], Any],
) -> None:
    """One episode.

    Args:
        specs: the tools, as chat templates read them.
        max_tool_s: time of a call.
        calling: returns a context for a call, from what is called.

    Raises: EpisodeEnded if a tool failed by itself, or no turn is left.
    """
    messages = list(task.messages)
    while True:
        (turn,) = await session.chat(messages, tools=specs)
        if not turn.tool_calls:
            return
        messages.append(turn.message())
        for call in turn.tool_calls:
            with calling(f"tool {call.name}"):
                content = await _result(call, tools, max_tool_s)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})


async def _result(call: Any, tools: EpisodeTools, max_s: float) -> str:
    """The text that the policy reads."""
    if call.malformed:
        return f"The call could not be read: {call.malformed}"
    try:
        result = await asyncio.wait_for(tools.call(call.name, json.loads(call.arguments)), max_s)
    except asyncio.TimeoutError:
        return f"The call took longer than {max_s:g} s and was stopped."
    if result.failure == "service":
        raise EpisodeEnded("tool_service", f"{call.name}: {result.detail or result.text}")
    return result.text

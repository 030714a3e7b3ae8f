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
    calling: Callable[[str], Any],
) -> None:
    """One episode.

    Args:
        specs: the tools, as chat templates read them.
        calling: returns a context for a call, from what is called.

    Raises: EpisodeEnded if a tool failed by itself, or no turn is left.
    """
    messages = list(task.messages)
    while True:
        (turn,) = await session.chat(messages, tools=specs)
        if not turn.tool_calls:
            return
        messages.append(turn.message())
        with calling(f"tool {', '.join(dict.fromkeys(call.name for call in turn.tool_calls))}"):
            texts = await asyncio.gather(*(_result(call, tools) for call in turn.tool_calls))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
            for call, text in zip(turn.tool_calls, texts, strict=True)
        ]


async def _result(call: Any, tools: EpisodeTools) -> str:
    """The text that the policy reads."""
    if call.malformed:
        return f"The call could not be read: {call.malformed}"
    result = await tools.call(call.name, json.loads(call.arguments))
    if result.failure == "service":
        raise EpisodeEnded("tool_service", f"{call.name}: {result.detail or result.text}")
    return result.text

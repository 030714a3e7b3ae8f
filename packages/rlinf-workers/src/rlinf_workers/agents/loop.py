"""The agent that is built in.

The policy answers, the calls in its answer are made, their results follow, until it answers without a call. A text
environment reads that answer, if there is one, and the policy goes on with what it says, until the environment ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any

from rlinf_workers.agents.link import AgentTask
from rlinf_workers.agents.records import EpisodeEnded
from rlinf_workers.agents.sessions import AgentSession, AssistantTurn
from rlinf_workers.agents.tools import CheckedEnvironment, EpisodeTools, TextStep


async def run_loop(
    session: AgentSession,
    task: AgentTask,
    tools: EpisodeTools,
    specs: list[dict[str, Any]],
    environment: CheckedEnvironment | None,
    calling: Callable[[str], Any],
) -> None:
    """One episode.

    Args:
        specs: the tools, as chat templates read them.
        calling: returns a context for a call, from what is called.

    Raises: EpisodeEnded if a tool or the environment failed by itself, or no turn is left.
    """
    messages = list(task.messages)
    if environment is not None:
        with calling("the environment"):
            first = _checked(await environment.reset(seed_of(task), task.row))
        messages[-1] = {**messages[-1], "content": _joined(messages[-1]["content"], first.text)}
        session.next_state = first.text
    while True:
        (turn,) = await session.chat(messages, tools=specs)
        messages.append(turn.message())
        if not turn.tool_calls:
            if environment is None or (answer := await _answer(session, turn, environment, calling)) is None:
                return
            messages.append({"role": "user", "content": answer})
            continue
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


def seed_of(task: AgentTask) -> int:
    """The seed of an environment: the column `seed` of the task's row, or else a digest of the task, so that all
    episodes of a prompt begin alike."""
    if isinstance(seed := task.row.get("seed"), int):
        return seed
    described = json.dumps([task.text, task.row], sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(described.encode()).digest()[:4], "big")


async def _answer(
    session: AgentSession, turn: AssistantTurn, environment: CheckedEnvironment, calling: Callable[[str], Any]
) -> str | None:
    """What the environment says to a turn, which gets its reward; None at the end."""
    with calling("the environment"):
        step = _checked(await environment.step(turn.content))
    session.reward_turn(turn, step.reward)
    session.next_state = step.text
    return None if step.terminated or step.truncated else step.text


def _checked(step: TextStep) -> TextStep:
    if step.failure == "service":
        raise EpisodeEnded("tool_service", f"the environment: {step.detail}")
    return step


def _joined(prompt: str, observation: str) -> str:
    return "\n\n".join(text for text in (prompt, observation) if text)

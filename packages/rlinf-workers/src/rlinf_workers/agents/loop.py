"""The agent that is built in.

The policy answers, the calls in its answer are made, their results follow, until it answers without a call. A text
environment reads that answer, if there is one, and the policy goes on with what it says, until the environment ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from rlinf_workers.agents.link import AgentTask
from rlinf_workers.agents.messages import RequestRefused
from rlinf_workers.agents.records import EpisodeEnded
from rlinf_workers.agents.sessions import AgentSession, AssistantTurn
from rlinf_workers.agents.tools import CheckedEnvironment, TextStep


async def run_loop(
    session: AgentSession,
    task: AgentTask,
    environment: CheckedEnvironment | None,
    calling: Callable[[str], Any],
) -> None:
    """One episode.

    Args:
        calling: returns a context for what the environment does, from what is called.

    Raises: EpisodeEnded if a tool or the environment failed by itself, or no turn is left.
    """
    messages, specs = list(task.messages), session.tools.specs
    if environment is not None:
        with calling("the environment"):
            first = _checked(await environment.reset(seed_of(task), task.row))
        messages[-1] = {**messages[-1], "content": _joined(messages[-1]["content"], first.text)}
        session.next_state = first.text
    while True:
        try:
            (turn,) = await session.chat(messages, tools=specs)
        except RequestRefused as refusal:
            if isinstance(messages[-1]["content"], list):  # parts, which a tool made
                raise EpisodeEnded("tool_service", str(refusal)) from refusal
            raise
        messages.append(turn.message())
        if not turn.tool_calls:
            if environment is None or (answer := await _answer(session, turn, environment, calling)) is None:
                return
            messages.append({"role": "user", "content": answer})
            continue
        messages += await session.tools.answers(turn.tool_calls)


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


def _joined(prompt: Any, observation: str) -> Any:
    """A content, a text or parts, and what follows it."""
    if isinstance(prompt, list):
        return [*prompt, {"type": "text", "text": f"\n\n{observation}"}] if observation else prompt
    return "\n\n".join(text for text in (prompt, observation) if text)

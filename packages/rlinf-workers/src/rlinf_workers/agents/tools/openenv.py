"""The text environment `openenv`: a server of OpenEnv, one session for each episode, through its generic client.

The package `openenv` pins an old `mcp` and brings gradio, so it is in no extra: install it in a venv of its own if the
tool `mcp` is needed, too. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlinf_workers.agents.tools.base import ToolFailed, ToolUnavailable
from rlinf_workers.agents.tools.environments import TextStep
from rlinf_workers.plugins import Spec

NOT_AN_ACTION = "VALIDATION_ERROR"
"""Code with which a server refuses an action that does not fit its model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenEnvOptions:
    """Options of an OpenEnv server."""

    url: str
    """Of the server, "http://127.0.0.1:8000"."""
    action_key: str = "message"
    """Field of the action that gets the policy's text."""
    action: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of each action."""
    observation_key: str | None = None
    """Field of the observation that the policy reads; null: the whole observation as JSON."""
    message_limit_s: float = 60.0
    """Deadline of each answer of the server."""


SPEC = Spec(
    name="openenv", implementation="rlinf_workers.agents.tools.openenv:OpenEnvEnvironment", options=OpenEnvOptions
)


class OpenEnvEnvironment:
    """A session of an OpenEnv server."""

    def __init__(self, options: OpenEnvOptions) -> None:
        try:
            from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ToolUnavailable(f"this environment needs openenv: pip install openenv ({error})") from error
        self._options = options
        self._client: Any = GenericEnvClient(base_url=options.url, message_timeout_s=options.message_limit_s)

    async def reset(self, seed: int, row: Mapping[str, Any]) -> TextStep:
        return self._read(await self._client.reset(seed=seed), is_first=True)

    async def step(self, text: str) -> TextStep:
        """Raises: ToolFailed: the text makes no valid action."""
        try:
            result = await self._client.step({**self._options.action, self._options.action_key: text})
        except RuntimeError as error:
            if NOT_AN_ACTION in str(error):
                raise ToolFailed(f"This is no possible action: {error}") from error
            raise
        return self._read(result)

    async def close(self) -> None:
        await self._client.close()

    def _read(self, result: Any, *, is_first: bool = False) -> TextStep:
        observation, key = result.observation, self._options.observation_key
        if key is not None and not isinstance(observation.get(key), str):
            raise ToolUnavailable(f"the observation has no text {key!r}, but {sorted(observation)}")
        text = observation[key] if key is not None else msgspec.json.encode(observation).decode()
        reward = 0.0 if is_first or result.reward is None else float(result.reward)
        return TextStep(text=text, reward=reward, terminated=bool(result.done))

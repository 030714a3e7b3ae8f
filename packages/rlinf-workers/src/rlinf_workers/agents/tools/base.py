"""What a tool is, what a call results in, and who caused a failure.

A `Tool` belongs to a run, its `ToolSession`s to episodes. `registry.make_tools` creates tools by name and wraps each in
the checks of checked.py, so an implementation may raise and may return texts of any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

Failure = Literal["", "policy", "service"]
"""Who caused a failure; "": the call succeeded.

policy: what the policy asked for failed by its own doing (its program raised, reached a limit or ended its process; bad
arguments; an unknown file), so the text tells it and the episode goes on. service: the tool could not be reached or
failed by itself, so the caller tries again with a new session and in the end discards the episode.
"""


class ToolFailed(Exception):
    """Raised in a tool when a call failed by the policy's doing; the policy reads the message."""


class ToolUnavailable(Exception):
    """Raised in a tool that cannot be reached or does not work. Any exception but `ToolFailed` means the same; of this
    one the message alone is reported, without a traceback."""


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy reads about a function that it may call.

    Example: ToolSpec(name="search", description="Searches the corpus.", parameters={
        "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]})
    """

    name: str
    """Letters, digits, `_` and `-`; at most 64 characters."""
    description: str
    parameters: dict[str, Any]
    """JSON schema (draft 2020-12) of an object: the arguments."""

    def as_openai(self) -> dict[str, Any]:
        """An entry of the list `tools` of OpenAI's chat completions, which chat templates take, too."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a call resulted in.

    Example: ToolResult(text="ZeroDivisionError: division by zero", failure="policy", detail="raised", wall_s=0.002)
    """

    text: str
    """What the policy reads; valid Unicode, at most the tool's `max_characters` long."""
    failure: Failure = ""
    detail: str = ""
    """For people and counters: what happened, with the traceback if a tool raised an unexpected exception."""
    wall_s: float = 0.0
    """Seconds from the call to its result; waiting for a free place is part of it."""
    pictures: tuple[bytes, ...] = ()
    """Files of pictures that the policy sees after the text, such as PNG."""


class ToolSession(Protocol):
    """The state that a tool has for one episode. One call runs at a time."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls the function `name` of the tool. Sessions of `make_tools` raise nothing but asyncio.CancelledError."""
        ...

    async def close(self) -> None:
        """Releases what the session holds. May be called at any time and more than once."""
        ...


@runtime_checkable
class SupportsSnapshot(Protocol):
    """A session whose state can be recreated in another session of the same tool, where an episode branches."""

    def snapshot(self) -> bytes:
        """The present state; cheap. It stays valid after the session has closed."""
        ...

    async def restore(self, snapshot: bytes) -> ToolResult:
        """Recreates the state in this session, which must be new. The text is empty; `detail` says what differs from
        the original, if anything."""
        ...


class Tool(Protocol):
    """One or more functions that share a state for each episode."""

    time_limit_s: float | None
    """Deadline of a call, whose expiry is a failure of the service; None: the tool limits its calls itself."""
    max_characters: int
    """Longer texts are cut in the middle."""
    keeps_state: bool
    """Whether a call can depend on earlier calls of its episode."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The functions of the tool; available once `start` has returned."""
        ...

    async def start(self) -> None:
        """Prepares the tool for a run: reads a corpus, connects to a server. Called once, before anything else.

        Raises:
            ToolUnavailable: it cannot work with these options; the message says why.
        """
        ...

    def open(self, episode: str) -> ToolSession:
        """A new session. Cheap: what takes time happens in its first call."""
        ...

    async def close(self) -> None:
        """Releases what the tool holds; its sessions are closed before."""
        ...

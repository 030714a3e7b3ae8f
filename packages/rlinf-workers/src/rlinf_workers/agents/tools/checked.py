"""The checks around every tool: arguments by their JSON schema, a deadline, the length of the text, and exceptions.

After them a call returns a `ToolResult` whatever the tool does, unless the caller cancels it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, get_args

from rlinf_algos import did_you_mean
from rlinf_workers.agents.tools.base import (
    Failure,
    SupportsSnapshot,
    Tool,
    ToolFailed,
    ToolResult,
    ToolSession,
    ToolSpec,
    ToolUnavailable,
)
from rlinf_workers.agents.tools.limits import cut, unicode_text

UNAVAILABLE = "The tool is not available."
"""What the policy would read if a caller went on after a failure of the service."""
MAX_DETAIL_CHARACTERS = 4000
CLOSING_LIMIT_S = 10.0
FAILURES = get_args(Failure)
_LOG = logging.getLogger(__name__)


class CheckedTool:
    """A tool whose sessions are checked; see the module's docstring."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        """The tool itself."""
        self._validators: dict[str, Any] = {}

    @property
    def time_limit_s(self) -> float | None:
        return self.tool.time_limit_s

    @property
    def max_characters(self) -> int:
        return self.tool.max_characters

    @property
    def keeps_state(self) -> bool:
        return self.tool.keeps_state

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self.tool.specs

    @property
    def names(self) -> str:
        """Its functions, for messages."""
        return ", ".join(spec.name for spec in self.specs)

    async def start(self) -> None:
        """Raises: ToolUnavailable, also if a schema of its parameters is invalid."""
        await self.tool.start()
        self._validators = {spec.name: _validator(spec) for spec in self.specs}

    def open(self, episode: str) -> CheckedSession:
        return CheckedSession(self, episode)

    async def close(self) -> None:
        await self.tool.close()

    def check(self, name: str, arguments: Any) -> None:
        """Raises ToolFailed if the tool has no such function or it does not take these arguments."""
        if name not in self._validators:
            raise ToolFailed(f"There is no tool {name!r}; {did_you_mean(name, self._validators)}")
        if not isinstance(arguments, Mapping):
            raise ToolFailed(f"The arguments of {name} must be an object, not {type(arguments).__name__}.")
        errors = sorted(self._validators[name].iter_errors(dict(arguments)), key=lambda error: error.json_path)
        if errors:
            text = "; ".join(f"{error.json_path[2:] or 'the arguments'}: {error.message}" for error in errors[:3])
            raise ToolFailed(f"Wrong arguments of {name}: {text}")


class CheckedSession:
    """A session of a `CheckedTool`. Its inner session opens with the first call that is valid."""

    def __init__(self, tool: CheckedTool, episode: str) -> None:
        self._tool, self._episode = tool, episode
        self._session: ToolSession | None = None
        self._is_closed = False

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        async def checked() -> ToolResult:
            self._tool.check(name, arguments)
            return await self._inner().call(name, arguments)

        return await self._guarded(name, checked())

    async def close(self) -> None:
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            try:
                await asyncio.wait_for(session.close(), CLOSING_LIMIT_S)
            except Exception:  # noqa: BLE001 - the episode is over whether or not the tool can close
                _LOG.warning("a session of %s did not close", self._tool.names, exc_info=True)

    def snapshot(self) -> bytes | None:
        """The inner session's snapshot; None if it has no state to recreate.

        Raises:
            ToolUnavailable: it has a state that cannot be recreated.
        """
        if self._session is None or not self._tool.keeps_state:
            return None
        if not isinstance(self._session, SupportsSnapshot):
            raise ToolUnavailable(f"the state of {self._tool.names} cannot be recreated in another session")
        return self._session.snapshot()

    async def restore(self, snapshot: bytes | None) -> ToolResult:
        """Recreates a state in this session, which must be new."""

        async def restored() -> ToolResult:
            if snapshot is None:
                return ToolResult(text="")
            session = self._inner()
            assert isinstance(session, SupportsSnapshot), "snapshots come from a session of the same tool"
            return await session.restore(snapshot)

        return await self._guarded("restoring", restored(), limited=False)

    def _inner(self) -> ToolSession:
        if self._is_closed:
            raise ToolUnavailable("the session is closed")
        if self._session is None:
            self._session = self._tool.tool.open(self._episode)
        return self._session

    async def _guarded(self, name: str, action: Coroutine[Any, Any, ToolResult], *, limited: bool = True) -> ToolResult:
        start = time.monotonic()
        result, failure, detail = await settled(name, action, self._tool.time_limit_s if limited else None)
        if failure == "" and (problem := _problem(result)):
            result, failure, detail = None, "service", f"{name} returned {problem}"
        if result is None:
            text = detail if failure == "policy" else UNAVAILABLE
            result = ToolResult(text=text, failure=failure, detail=detail)
        return ToolResult(
            text=cut(unicode_text(result.text), self._tool.max_characters),
            failure=result.failure,
            detail=cut(unicode_text(result.detail), MAX_DETAIL_CHARACTERS),
            wall_s=time.monotonic() - start,
            pictures=result.pictures,
        )


async def settled(name: str, action: Coroutine[Any, Any, Any], limit_s: float | None) -> tuple[Any, Failure, str]:
    """What an action returns, or None with who caused its failure and what happened.

    Args:
        name: of the action, in messages.
        limit_s: its deadline; None: it has none.
    """
    try:
        return await _within(name, action, limit_s), "", ""
    except ToolFailed as error:
        return None, "policy", str(error)
    except ToolUnavailable as error:
        return None, "service", str(error)
    except Exception:  # noqa: BLE001 - whatever a tool raises becomes the result
        return None, "service", traceback.format_exc()


async def _within(name: str, action: Coroutine[Any, Any, Any], limit_s: float | None) -> Any:
    """The action's result. It runs in a task of its own, so that a tool that cancels itself does not cancel its caller.

    Raises:
        ToolUnavailable: it was not done in time, or it cancelled itself.
    """
    task = asyncio.ensure_future(_contained(action))
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if not done:
        await _cancel(task)
        raise ToolUnavailable(f"{name} did not answer within {limit_s:g} s")
    if task.cancelled():
        raise ToolUnavailable(f"{name} cancelled itself")
    return task.result()


def _problem(result: Any) -> str:
    """What is wrong with what a tool returned; "": nothing."""
    if not isinstance(result, ToolResult):
        return f"a {type(result).__name__}, not a ToolResult"
    if not (isinstance(result.text, str) and isinstance(result.detail, str) and result.failure in FAILURES):
        return f"an invalid ToolResult: {result!r}"
    if not (isinstance(result.pictures, tuple) and all(isinstance(one, bytes) for one in result.pictures)):
        return "pictures that are no tuple of bytes"
    return ""


async def _contained(action: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await action
    except (SystemExit, KeyboardInterrupt) as error:  # from a task they would end the whole event loop
        raise RuntimeError(f"the tool raised {type(error).__name__}") from error


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancels a task and gives it a moment to end; one that goes on is left alone."""
    task.cancel()
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # so that asyncio does not report it
    await asyncio.wait({task}, timeout=CLOSING_LIMIT_S)


def _validator(spec: ToolSpec) -> Any:
    """Checks arguments by the schema; a reference to another document is an error, since nothing is fetched."""
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from referencing import Registry
    except ImportError as error:
        raise ToolUnavailable(f"tools need jsonschema: pip install 'rlinf-workers[agents]' ({error})") from None
    try:
        Draft202012Validator.check_schema(spec.parameters)
    except SchemaError as error:
        raise ToolUnavailable(f"the parameters of the tool {spec.name!r} are no JSON schema: {error.message}") from None
    return Draft202012Validator(spec.parameters, registry=Registry())

"""The tool `mcp`: the functions of a server of the Model Context Protocol, through the official client (package `mcp`).

The server is a program that is started here and speaks over its standard input and output, or one at a URL that speaks
streamable HTTP. Episodes share one connection, or each has its own; a connection that was lost is opened again by the
next call. Failures:
- a result that the server marks as an error is the policy's, as the protocol means it for the model to read; except the
  text with which the official server hides an exception, and unless `errors_of` says otherwise;
- invalid parameters are the policy's;
- every other error of the protocol, a lost connection and a deadline are the service's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rlinf_algos import did_you_mean
from rlinf_workers.agents.tools.base import ToolFailed, ToolResult, ToolSpec, ToolUnavailable
from rlinf_workers.agents.tools.limits import check_limits
from rlinf_workers.models.picture_files import picture_from_base64
from rlinf_workers.plugins import OptionError, Spec

INVALID_PARAMETERS, CONNECTION_CLOSED = -32602, -32000
"""Codes of JSON-RPC and of the client."""
CLOSING_LIMIT_S = 15.0
"""The client gives a server that is asked to end a few seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class McpOptions:
    """The tool's options; either `command` or `url` is required."""

    command: tuple[str, ...] = ()
    """The program of the server and its arguments."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Env vars of that program, in addition to a few harmless ones of this process such as PATH."""
    folder: str | None = None
    """Working folder of that program; null: that of this process."""
    url: str = ""
    """Of a server that runs already, "http://127.0.0.1:8000/mcp"."""
    connection: Literal["shared", "episode"] = "shared"
    """Whether all episodes share a connection. With `episode` each has a server of its own (or a session of the server
    at `url`), whose state stays from call to call and cannot be recreated in a branch."""
    functions: tuple[str, ...] | None = None
    """The functions that the policy may call; null: all."""
    prefix: str = ""
    """Precedes the name of each function, so that two servers do not have the same names."""
    errors_of: Literal["policy", "service"] = "policy"
    """Who causes results that the server marks as errors."""
    time_limit_s: float = 60.0
    """Deadline of a call in seconds."""
    start_limit_s: float = 60.0
    """Deadline of opening a connection in seconds."""
    max_characters: int = 8000
    """Longer results are cut in the middle."""

    def __post_init__(self) -> None:
        check_limits(self.time_limit_s, self.max_characters)
        if bool(self.command) == bool(self.url):
            raise OptionError("command", " or url: one of them is required, not both")
        if not self.start_limit_s > 0:
            raise OptionError("start_limit_s", f"={self.start_limit_s!r} must be above 0")


SPEC = Spec(name="mcp", implementation="rlinf_workers.agents.tools.mcp:McpTool", options=McpOptions)


class McpTool:
    """The functions of one server; see the module's docstring."""

    def __init__(self, options: McpOptions) -> None:
        self.options = options
        self.max_characters = options.max_characters
        self.keeps_state = options.connection == "episode"
        self.time_limit_s: float | None = options.time_limit_s + options.start_limit_s
        """A call may have to open the connection; its own part is limited by the session."""
        self.specs: Sequence[ToolSpec] = ()
        self._shared = McpSession(options)

    async def start(self) -> None:
        """Connects and reads what functions there are. Raises: ToolUnavailable."""
        if self.specs:
            return
        try:
            listed = await self._shared.list_functions()
            self.specs = [
                ToolSpec(name=self.options.prefix + tool.name, description=tool.description or "", parameters=schema)
                for tool, schema in ((tool, dict(tool.input_schema)) for tool in self._allowed(listed))
            ]
        except ToolUnavailable:
            await self.close()
            raise
        if self.keeps_state:
            await self._shared.close()

    def open(self, episode: str) -> McpSession | _SharedSession:
        """A connection for this episode, which opens with the first call, or the shared one."""
        return McpSession(self.options) if self.keeps_state else _SharedSession(self._shared)

    async def close(self) -> None:
        await self._shared.close()

    def _allowed(self, listed: Sequence[Any]) -> list[Any]:
        names = [tool.name for tool in listed]
        for name in self.options.functions or ():
            if name not in names:
                raise ToolUnavailable(f"{_server(self.options)} has no function {name!r}; {did_you_mean(name, names)}")
        chosen = [tool for tool in listed if self.options.functions is None or tool.name in self.options.functions]
        if not chosen:
            raise ToolUnavailable(f"{_server(self.options)} has no functions")
        return chosen


class McpSession:
    """One connection, opened when it is needed, and again after it was lost."""

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def list_functions(self) -> list[Any]:
        """All functions of the server. Raises: ToolUnavailable."""
        client = (await self._connected()).client
        listed, cursor = [], None
        try:
            while True:
                page = await asyncio.wait_for(client.list_tools(cursor=cursor), self._options.start_limit_s)
                listed += page.tools
                if (cursor := page.next_cursor) is None:
                    return listed
        except Exception as error:  # of the client, of its transports, or a deadline
            raise ToolUnavailable(f"{_server(self._options)} did not list its functions: {_text(error)}") from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises: ToolFailed, ToolUnavailable."""
        connection = await self._connected()
        function = name[len(self._options.prefix) :]
        call = asyncio.ensure_future(connection.client.call_tool(function, dict(arguments)))
        try:
            done, _ = await asyncio.wait({call}, timeout=self._options.time_limit_s)
        finally:
            call.cancel()
        if not done:
            raise ToolUnavailable(
                f"{name} of {_server(self._options)} did not answer within {self._options.time_limit_s:g} s"
            )
        error = call.exception() if not call.cancelled() else asyncio.CancelledError("the client cancelled the call")
        if error is None:
            return self._result(function, call.result())
        code = getattr(error, "code", CONNECTION_CLOSED)
        if code == INVALID_PARAMETERS:
            raise ToolFailed(_text(error))
        if code == CONNECTION_CLOSED or connection.has_ended:
            await self._drop(connection)
        raise ToolUnavailable(f"{name} of {_server(self._options)} failed: {_text(error)}") from error

    async def close(self) -> None:
        self._is_closed = True
        async with self._lock:
            if self._connection is not None:
                await self._connection.close()
                self._connection = None

    async def _connected(self) -> _Connection:
        async with self._lock:
            if self._is_closed:
                raise ToolUnavailable("the session is closed")
            if self._connection is not None and self._connection.has_ended:
                await self._connection.close()
                self._connection = None
            if self._connection is None:
                connection = _Connection(self._options)
                await connection.open()
                self._connection = connection
            return self._connection

    async def _drop(self, connection: _Connection) -> None:
        async with self._lock:
            if self._connection is connection:
                self._connection = None
        await connection.close()

    def _result(self, function: str, result: Any) -> ToolResult:
        text = "\n".join(_content(block) for block in result.content if not _is_picture(block))
        if not result.content and result.structured_content is not None:
            text = msgspec.json.encode(result.structured_content).decode()
        if not result.is_error:
            return ToolResult(text=text, pictures=tuple(map(_picture, filter(_is_picture, result.content))))
        if self._options.errors_of == "service" or text == f"Error executing tool {function}":
            raise ToolUnavailable(f"{function} of {_server(self._options)}: {text}")
        return ToolResult(text=text, failure="policy", detail=text)


class _SharedSession:
    """The session of an episode on the shared connection, which it leaves open."""

    def __init__(self, session: McpSession) -> None:
        self._session = session

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._session.call(name, arguments)

    async def close(self) -> None:
        """The connection belongs to the tool."""


class _Connection:
    """A client in a task of its own: the client must be left by the task that entered it."""

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._stop = asyncio.Event()
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self.client: Any = None

    @property
    def has_ended(self) -> bool:
        """Whether the connection was lost."""
        return self._task is None or self._task.done()

    async def open(self) -> None:
        """Raises: ToolUnavailable."""
        self._task = asyncio.create_task(self._run())
        try:
            done, _ = await asyncio.wait({self._opened}, timeout=self._options.start_limit_s)
        except asyncio.CancelledError:
            await self.close()
            raise
        if not done:
            await self.close()
            raise ToolUnavailable(f"{_server(self._options)} did not start within {self._options.start_limit_s:g} s")
        self.client = self._opened.result()

    async def close(self) -> None:
        """Ends the connection, and the server if it was started here."""
        self._stop.set()
        if self._task is None:
            return
        if not self._opened.done():
            self._task.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=CLOSING_LIMIT_S)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSING_LIMIT_S)

    async def _run(self) -> None:
        try:
            async with _client(self._options) as client:
                self._opened.set_result(client)
                await self._stop.wait()
        except BaseException as error:  # of the client, of its transports, or the task was cancelled
            if not self._opened.done():
                text = f"{_server(self._options)} cannot be reached: {_text(error)}"
                self._opened.set_exception(ToolUnavailable(text))
                self._opened.exception()  # so that it is not reported if nobody waits
            if not isinstance(error, Exception):
                raise


def _client(options: McpOptions) -> Any:
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise ToolUnavailable(f"this tool needs mcp: pip install 'rlinf-workers[agents-mcp]' ({error})") from error
    if options.url:
        return Client(options.url)
    program, *arguments = options.command
    env_vars = dict(options.env_vars)
    return Client(
        StdioServerParameters(command=program, args=arguments, env=env_vars, cwd=options.folder or os.getcwd())
    )


def _server(options: McpOptions) -> str:
    return f"the MCP server {options.url or ' '.join(options.command)}"


def _is_picture(block: Any) -> bool:
    return block.type == "image"


def _picture(block: Any) -> bytes:
    """The file of a block of type image."""
    return picture_from_base64(block.data)


def _content(block: Any) -> str:
    """The text of a block; for others a note, since the policy reads text and pictures."""
    if block.type == "text":
        return block.text
    if block.type == "resource" and isinstance(getattr(block.resource, "text", None), str):
        return block.resource.text
    return f"[{block.type} left out]"


def _text(error: BaseException) -> str:
    """The first cause, without the groups that task groups raise."""
    while causes := getattr(error, "exceptions", ()):
        error = causes[0]
    return f"{type(error).__name__}: {getattr(error, 'message', error)}"

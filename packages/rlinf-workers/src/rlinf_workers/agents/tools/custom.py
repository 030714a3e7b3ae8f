"""A custom tool: a Python function with annotations and a docstring.

    async def weather(city: str, days: Literal[1, 7] = 1) -> str:
        \"\"\"The forecast for a city.

        Args:
            city: its name in English.
        \"\"\"
        if city not in STATIONS:
            raise ToolFailed(f"There is no station in {city!r}.")   # the policy reads this
        return await forecast(city, days)                           # another exception: the service has failed

The policy sees the function's name, the docstring without its sections, and a JSON schema of the parameters (msgspec:
numbers, texts, Literal, lists, mappings, dataclasses, optional values). A text that is returned is the result, None is
the empty text, another value is written as JSON. `ToolResult(text="The map:", pictures=(content,))` shows a picture,
whose file has this content. A function that is not async runs in a thread of its own; one that does not return in time
is left running there, and after `MAX_LEFT_CALLS` of them the tool is unavailable.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from rlinf_algos import AlgosError
from rlinf_workers.agents.tools.base import ToolFailed, ToolResult, ToolSpec, ToolUnavailable
from rlinf_workers.agents.tools.limits import check_limits
from rlinf_workers.plugins import Spec

MAX_LEFT_CALLS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionOptions:
    """Options of a function."""

    name: str | None = None
    """What the policy calls it; null: the function's own name."""
    time_limit_s: float = 60.0
    """Deadline of a call in seconds. That it expires counts as a failure of the service."""
    max_characters: int = 8000
    """Longer results are cut in the middle."""

    def __post_init__(self) -> None:
        check_limits(self.time_limit_s, self.max_characters)


FUNCTION = Spec(name="function", options=FunctionOptions)
"""For reading the options; functions are named by their import path."""


class FunctionTool:
    """A function as a tool; see the module's docstring.

    Raises:
        AlgosError: a parameter without annotation, or of a kind or type that has no JSON schema.
    """

    keeps_state = False

    def __init__(self, function: Callable[..., Any], options: FunctionOptions | None = None) -> None:
        options = options or FunctionOptions()
        self.time_limit_s: float | None = options.time_limit_s
        self.max_characters = options.max_characters
        self._function = function
        self._arguments = _arguments_of(function)
        self.specs = (_spec_of(function, options.name or function.__name__, self._arguments),)
        self._left = 0

    async def start(self) -> None:
        """Does nothing."""

    def open(self, episode: str) -> FunctionTool:
        """All episodes share the function."""
        return self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises ToolFailed if the arguments do not fit, and whatever the function raises."""
        try:
            converted = msgspec.convert(dict(arguments), self._arguments)
        except msgspec.ValidationError as error:
            raise ToolFailed(f"Wrong arguments of {name}: {error}") from None
        named = {key: getattr(converted, key) for key in arguments}
        if inspect.iscoroutinefunction(self._function):
            value = await self._function(**named)
        else:
            value = await self._in_thread(named)
        return _result(value)

    async def close(self) -> None:
        """Does nothing."""

    async def _in_thread(self, named: Mapping[str, Any]) -> Any:
        """A daemon thread for each call, since a call that hangs must hold up neither others nor the end of the run."""
        if self._left >= MAX_LEFT_CALLS:
            raise ToolUnavailable(f"{self._left} calls of {self.specs[0].name} have not returned after their deadline")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> None:
            value, error = None, None
            try:
                value = context.run(self._function, **named)
            except BaseException as raised:  # noqa: BLE001 - raised again by the caller
                error = raised
            try:
                loop.call_soon_threadsafe(report, value, error)
            except RuntimeError:
                pass  # the loop has closed: nobody waits any more

        def report(value: Any, error: BaseException | None) -> None:
            if outcome.cancelled():
                self._left -= 1
            else:
                outcome.set_result((value, error))

        threading.Thread(target=run, name=f"tool {self.specs[0].name}", daemon=True).start()
        try:
            value, error = await outcome
        except asyncio.CancelledError:
            self._left += 1
            raise
        if error is not None:
            raise error
        return value


def _result(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if value is None or isinstance(value, str):
        return ToolResult(text=value or "")
    return ToolResult(text=msgspec.json.encode(value).decode())


def _arguments_of(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """A record of the function's parameters, which converts arguments to their types."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        parameters, types = inspect.signature(function).parameters, get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise AlgosError(f"the tool {name} has no signature that can be read: {error}") from error
    fields: list[Any] = []
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise AlgosError(
                f"the tool {name} has the parameter {str(parameter)!r}: the policy passes arguments by name"
            )
        if parameter.name not in types:
            raise AlgosError(f"the parameter {parameter.name!r} of the tool {name} has no annotation")
        default = () if parameter.default is parameter.empty else (_default(parameter.default),)
        fields.append((parameter.name, types[parameter.name], *default))
    return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)


def _default(value: Any) -> Any:
    """The default for the schema; the call itself leaves absent arguments to the function."""
    return msgspec.field(default_factory=lambda: value) if isinstance(value, list | dict | set) else value


def _spec_of(function: Callable[..., Any], name: str, arguments: type[msgspec.Struct]) -> ToolSpec:
    text = inspect.getdoc(function) or ""
    description, _, sections = text.partition("\n\nArgs:\n")
    description = re.split(r"\n\n(?:Returns|Raises|Example|Yields):", description)[0]
    try:
        (reference,), parts = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise AlgosError(f"the parameters of the tool {name} have no JSON schema: {error}") from error
    schema = parts.pop(reference["$ref"].rpartition("/")[2])
    parameters: dict[str, Any] = {key: schema[key] for key in ("type", "properties", "required")}
    for parameter, line in _described(sections).items():
        if parameter in parameters["properties"]:
            parameters["properties"][parameter].setdefault("description", line)
    parameters["additionalProperties"] = False
    return ToolSpec(
        name=name, description=description.strip(), parameters=parameters | ({"$defs": parts} if parts else {})
    )


def _described(section: str) -> dict[str, str]:
    """The parameters' descriptions in the lines after `Args:`."""
    descriptions: dict[str, str] = {}
    name, indent = "", None
    for line in section.split("\n"):
        if not line.startswith(" "):
            break
        width = len(line) - len(line.lstrip())
        indent = width if indent is None else indent
        entry = re.match(r"(\w+)(?: \(.*?\))?: (.*)", line.strip())
        if width == indent and entry:
            name, descriptions[entry[1]] = entry[1], entry[2]
        elif name:
            descriptions[name] += " " + line.strip()
    return descriptions

"""What a format of tool calls does, and how the one of a chat template is chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's chat form, as `read_tools` returns them."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A well-formed call in a policy's text."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = ""
    """If the policy wrote one."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What begins like a call of a tool and is none."""

    text: str
    """All that the policy wrote of it."""
    problem: str
    """What is wrong with it, for the policy and for people."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A policy's text, taken apart.

    Example, hermes: 'Let me see.\\n<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>' ->
        content = "Let me see.", calls = (WrittenCall("add", '{"a": 1}'),)
    """

    content: str
    """What stands outside of well-formed calls; a malformed one is part of it."""
    calls: tuple[WrittenCall | MalformedCall, ...] = ()


class ToolFormat(Protocol):
    """One family's format of calls."""

    name: str
    ends: tuple[str, ...]
    """Tokens that may end a turn with calls, beside the template's own."""

    def read(self, text: str, tools: Tools) -> Reading:
        """Takes a turn's text, without its end token, apart. What begins like a call and is none is malformed."""
        ...


def format_of_template(source: str) -> ToolFormat | None:
    """The format whose marks a chat template contains; None: it has those of no known format.

    The order matters: some templates quote the marks of a wider family inside their own.
    """
    from rlinf_workers.agents.tool_formats import deepseek, glm, hermes, llama3, mistral, tagged

    if deepseek.SEPARATOR in source:
        return deepseek.DeepSeek(fenced="```json" in source)
    if "[TOOL_CALLS]" in source:
        return mistral.Mistral()
    if "<arg_key>" in source and "<tool_call>" in source:
        return glm.Glm()
    if "<function=" in source and "<tool_call>" in source:
        return tagged.Tagged()
    if "<tool_call>" in source and "tool_calls" in source:
        return hermes.Hermes()
    if "<|start_header_id|>" in source and '"parameters": ' in source and "tool_calls" in source:
        return llama3.Llama3()
    return None


def call_of_json(text: str, *, arguments_keys: Sequence[str] = ("arguments", "parameters")) -> WrittenCall | str:
    """A call that is written as one JSON object with a name and arguments; a text says why it is none."""
    try:
        return call_of_value(json.loads(text), arguments_keys=arguments_keys)
    except ValueError as error:
        return f"it is no JSON: {error}"


def call_of_value(value: Any, *, arguments_keys: Sequence[str] = ("arguments", "parameters")) -> WrittenCall | str:
    """`call_of_json` for a value that has been read."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return 'it is no JSON object with a "name"'
    arguments = next((value[key] for key in arguments_keys if key in value), {})
    if not isinstance(arguments, dict):
        return f"its arguments are no JSON object but {json.dumps(arguments)[:40]}"
    written_id = value.get("id")
    return WrittenCall(
        value["name"],
        json.dumps(arguments, ensure_ascii=False),
        written_id if isinstance(written_id, str) else "",
    )


def typed_value(text: str, tool: str, parameter: str, tools: Tools) -> Any:
    """The value of a parameter that a format writes as bare text: text where the tool declares text, else JSON."""
    declared = parameters_of(tool, tools).get(parameter)
    if isinstance(declared, dict) and declared.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def parameters_of(name: str, tools: Tools) -> dict[str, Any]:
    """Schemas of a tool's parameters by name; {} for a tool that declares none or does not exist."""
    declared = next((one["function"].get("parameters") for one in tools if one["function"]["name"] == name), None)
    return (declared or {}).get("properties") or {}


def joined(*texts: str) -> str:
    """The texts that are more than white space, a line each."""
    return "\n".join(text for text in texts if text.strip())

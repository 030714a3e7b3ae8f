"""Chat templates as Jinja programs, with the functions that Hugging Face's tools define for them.

Source of the functions and settings: the documentation of transformers ("Chat templates", "Writing a chat template").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlinf_workers.agents.messages import Message, RequestRefused


class GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote, for loss masks; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - of the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Renderer:
    """Renders conversations.

    Args:
        source: the template.
        variables: special tokens by role, and options of the template such as `enable_thinking`.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        now = datetime.now()  # once, so that a conversation over midnight has one date
        environment.globals["strftime_now"] = now.strftime
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Message | dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        opens_turn: bool,
        arguments_as_text: bool = False,
        as_lists: bool = False,
    ) -> str:
        """The text of a conversation.

        Args:
            opens_turn: it ends with what begins a turn of the assistant.
            arguments_as_text, as_lists: as in `Message.for_template`.

        Raises: RequestRefused with what the template says.
        """
        as_dicts = [
            one.for_template(arguments_as_text=arguments_as_text, as_lists=as_lists)
            if isinstance(one, Message)
            else one
            for one in messages
        ]
        try:
            return self._template.render(
                messages=as_dicts,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=opens_turn,
                **self._variables,
            )
        except (TemplateError, SecurityError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise RequestRefused(f"the chat template cannot show these messages: {error}") from error


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

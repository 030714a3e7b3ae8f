"""Formats of tool calls in a policy's text, one file a family, which is chosen by marks that a chat template shows."""

from rlinf_workers.agents.tool_formats.base import Reading, ToolFormat, format_of_template

__all__ = ["Reading", "ToolFormat", "format_of_template"]

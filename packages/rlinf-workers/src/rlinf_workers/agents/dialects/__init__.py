"""Dialects of the session server: how each API writes requests, answers, streams and errors."""

from rlinf_workers.agents.dialects.base import Dialect, DialectRequest
from rlinf_workers.agents.dialects.chat import ChatDialect
from rlinf_workers.agents.dialects.completions import CompletionsDialect
from rlinf_workers.agents.dialects.messages import MessagesDialect
from rlinf_workers.agents.dialects.responses import ResponsesDialect

__all__ = ["ChatDialect", "CompletionsDialect", "Dialect", "DialectRequest", "MessagesDialect", "ResponsesDialect"]

"""Chat templates: which tokens stand between a policy's turns, and what a turn's text means."""

from rlinf_workers.agents.templates.base import AuthoredTokens, ChatTemplate, TemplateRefused, ToolsRefused, TurnText
from rlinf_workers.agents.templates.jinja import JinjaTemplate
from rlinf_workers.agents.templates.loading import template_of_folder
from rlinf_workers.agents.templates.plain import PlainTemplate
from rlinf_workers.agents.templates.tokens import TokenText

__all__ = [
    "ChatTemplate",
    "JinjaTemplate",
    "AuthoredTokens",
    "PlainTemplate",
    "TemplateRefused",
    "TokenText",
    "ToolsRefused",
    "TurnText",
    "template_of_folder",
]

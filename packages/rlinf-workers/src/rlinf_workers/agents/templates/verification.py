"""Whether a chat template can be continued turn by turn: every conversation of a set is played and compared.

A conversation is played as a session would serve it: the tokens of the first prompt, of each turn as the template
shows it when it is the last one, and of each suffix. They must equal the tokens of a rendering of the whole. Every
suffix must also be the end of such a rendering by itself, whatever stands before.

Where only declared rules of the family differ, the outcome is `declared`. Everything else is refused, feature by
feature: a template without `parallel calls` still serves one call a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from rlinf_workers.agents.messages import Message, RequestRefused, ToolCall, difference, text_difference
from rlinf_workers.agents.templates.base import TemplateRefused, Tools

if TYPE_CHECKING:
    from rlinf_workers.agents.templates.jinja import JinjaTemplate

TOOLS_SHOWN = re.compile(r"\[AVAILABLE_TOOLS\].*?\[/AVAILABLE_TOOLS\]", re.DOTALL)
MEANINGS = {
    "thoughts": "thoughts of earlier turns, which the template drops, stay as they were served",
    "tools": "the tools, which the template shows before the last message of the user, stay where they were served",
    "merge": "what opens a turn and the turn's first characters, which the tokenizer would merge, stay apart",
}


@dataclass(frozen=True, slots=True)
class PlayedConversation:
    """How a conversation came out."""

    outcome: Literal["equal", "declared", "different", "rejected"]
    """rejected: the template raises an error for it."""
    detail: str = ""
    """What differs, or what the template says."""
    rules: tuple[str, ...] = ()


def features_of(messages: Sequence[Message], tools: Tools) -> Iterator[str]:
    """What a conversation needs of a template beside plain questions and answers, in the order of `PROBES`."""
    turns = [message for message in messages if message.role == "assistant"]
    if any(not turn.content.strip() and not turn.calls for turn in turns):
        yield "empty turns"
    if any(turn.thoughts for turn in turns):
        yield "thoughts"
    if tools:
        yield "tools"
    if any(len(turn.calls) > 1 for turn in turns):
        yield "parallel calls"
    if any(turn.calls and turn.content.strip() for turn in turns):
        yield "text beside calls"
    if any(turn.calls and turn.thoughts for turn in turns):
        yield "thoughts before calls"
    if any(one.role == "tool" and other.role == "user" for one, other in pairwise(messages)):
        yield "questions after results"
    if any(not one.calls and one.role != "tool" and other.role == "tool" for one, other in pairwise(messages)):
        yield "results after text"


def verify(template: JinjaTemplate) -> None:
    """Plays the probes; sets what is refused and declared. Raises: TemplateRefused."""
    rules: list[str] = []
    for feature, conversations in PROBES.items():
        if feature not in ("chat", "tools") and _is_left_out(template, feature):
            continue
        if feature == "tools" and template.format is None:
            continue
        for messages in conversations:
            tools = () if feature in ("chat", "empty turns", "thoughts") else TOOLS
            played = _play_either(template, messages, tools) if feature == "tools" else play(template, messages, tools)
            rules += played.rules
            if played.outcome in ("different", "rejected"):
                template.refused.setdefault(feature, played.detail)
    template.declared = {rule: MEANINGS[rule] for rule in dict.fromkeys(rules)}
    if "chat" in template.refused:
        raise TemplateRefused(f"this chat template cannot be continued exactly: {template.refused['chat']}")


def _is_left_out(template: JinjaTemplate, feature: str) -> bool:
    if "thoughts" in feature and not template.thought_marks:
        return True
    return feature not in ("empty turns", "thoughts") and (template.format is None or "tools" in template.refused)


def _play_either(template: JinjaTemplate, messages: Sequence[Message], tools: Tools) -> PlayedConversation:
    """Plays with the arguments of calls as an object, then, if that fails, as text."""
    played = play(template, messages, tools)
    if played.outcome in ("equal", "declared") or template.arguments_as_text:
        return played
    template.arguments_as_text = True
    again = play(template, messages, tools)
    if again.outcome in ("equal", "declared"):
        return again
    template.arguments_as_text = False
    return again if played.outcome == "rejected" else played


def play(template: JinjaTemplate, messages: Sequence[Message], tools: Tools) -> PlayedConversation:
    """Plays a conversation that does not begin with the assistant."""
    try:
        return _play(template, messages, tools)
    except RequestRefused as refusal:
        return PlayedConversation("rejected", str(refusal))


def _play(template: JinjaTemplate, messages: Sequence[Message], tools: Tools) -> PlayedConversation:
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    ends = [*turns[1:], len(messages)]
    text = _render(template, messages[: turns[0]], tools)
    token_ids = template.text.encode(text)
    rules: list[str] = []
    for turn, end in zip(turns, ends, strict=True):
        answer = turn_text(template, messages[: turn + 1], tools)
        served, merges = _served(template, text, answer, token_ids)
        rules += merges
        reread = _read_back(template, messages[turn], served, tools, token_ids)
        if isinstance(reread, str):
            return PlayedConversation("different", f"message {turn} (assistant) reads back otherwise: {reread}")
        messages = [*messages[:turn], reread, *messages[turn + 1 :]]
        if end == turn + 1:
            continue
        suffix = template.suffix_text(messages[:end], tools, turn + 1)
        suffix_ids = template.text.encode(suffix)
        text, token_ids = text + answer + suffix, [*token_ids, *served, *suffix_ids]
        rendered = _render(template, messages[:end], tools)
        verdict = _compare(template, text, token_ids, rendered, suffix_ids)
        if isinstance(verdict, str):
            return PlayedConversation("different", f"before message {end}: {verdict}")
        rules += verdict
    return PlayedConversation("declared" if rules else "equal", rules=tuple(dict.fromkeys(rules)))


def _compare(
    template: JinjaTemplate, text: str, token_ids: list[int], rendered: str, suffix_ids: list[int]
) -> list[str] | str:
    """Rules under which both are the same, or what differs."""
    rendered_ids = template.text.encode(rendered)
    if rendered_ids == token_ids:
        return []
    if rendered_ids[-len(suffix_ids) :] != suffix_ids:
        return "the suffix has other tokens than the end of the whole rendering"
    if text == rendered:
        return ["merge"]
    rules = rules_between(template, text, rendered)
    return rules or text_difference("the rendering", text, rendered)


def rules_between(template: JinjaTemplate, text: str, rendered: str) -> list[str]:
    """Rules of `JinjaTemplate.declared` that make two texts the same; []: they differ otherwise."""
    patterns = {"tools": TOOLS_SHOWN}
    if template.thought_marks:
        begin, end = map(re.escape, template.thought_marks)
        patterns["thoughts"] = re.compile(rf"{begin}.*?{end}\s*", re.DOTALL)
    rules: list[str] = []
    for rule, pattern in patterns.items():
        before, after = pattern.sub("", text), pattern.sub("", rendered)
        if (before, after) != (text, rendered):
            rules.append(rule)
        text, rendered = before, after
        if text == rendered:
            return rules
    return []


def turn_text(template: JinjaTemplate, messages: Sequence[Message], tools: Tools) -> str:
    """What the template shows of the last message, a turn, when nothing follows it."""
    opened = _render(template, messages[:-1], tools)
    rendered = template.rendered(messages, tools, opens_turn=False)
    thoughts = ""
    begin, close = template.thought_marks or ("", "")
    if begin and not rendered.startswith(opened) and opened.rstrip().endswith(begin):
        opened = opened.rstrip().removesuffix(begin)
        thoughts = f"{messages[-1].thoughts}\n{close}\n\n"
    if not rendered.startswith(opened):
        raise RequestRefused(text_difference("what opens the turn", opened, rendered[: len(opened)]))
    rest = rendered[len(opened) :]
    if thoughts and rest.startswith(begin):
        thoughts, rest = "", rest.removeprefix(begin).lstrip("\n")
    end = template.text.positions(rest, template.end_texts)
    return thoughts + (rest[: end.start()] if end else rest)


def _served(template: JinjaTemplate, text: str, answer: str, token_ids: list[int]) -> tuple[list[int], list[str]]:
    """Tokens of a turn, and whether they stay apart from what stands before."""
    opened = template.text.encode(text)
    whole = template.text.encode(text + answer)
    if whole[: len(opened)] == opened:
        return whole[len(opened) :], []
    return template.text.encode(answer), ["merge"]


def _read_back(
    template: JinjaTemplate, turn: Message, served: list[int], tools: Tools, token_ids: list[int]
) -> Message | str:
    """A turn as its tokens are read, or what differs.

    Spaces around the content are no difference: some templates put them there, and they are the policy's then.
    """
    read = template.read(served, tools, token_ids)
    if malformed := next((call.malformed for call in read.calls if call.malformed), ""):
        return malformed
    expected = replace(turn, content=turn.content.strip(), thoughts=turn.thoughts if template.thought_marks else "")
    reread = Message("assistant", read.content, read.thoughts, turn.calls)
    stripped = replace(reread, content=read.content.strip(), calls=read.calls)
    return difference(expected, stripped) or reread


def _render(template: JinjaTemplate, messages: Sequence[Message], tools: Tools) -> str:
    return template.rendered(messages, tools)


# -- probes ----------------------------------------------------------------------------------------------------------


def _call(number: int, name: str, arguments: str) -> ToolCall:
    return ToolCall(f"probecal{number}", name, arguments)


def _tool(name: str, **parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": f"A tool: {name}.", "parameters": schema}}


TOOLS: tuple[dict[str, Any], ...] = (
    _tool("look_up", query={"type": "string", "description": "What to look up."}),
    _tool("add", a={"type": "number"}, b={"type": "number"}),
)
_USER, _MORE = Message("user", "What is 2 plus 2?"), Message("user", "And then?")
_ANSWER = Message("assistant", "It is four.")
_THOUGHT = Message("assistant", "It is four.", "Two and two.\nThat is easy.")
_ADD = _call(1, "add", '{"a": 2, "b": 2.5}')
_LOOK = _call(2, "look_up", '{"query": "to \\"quote\\", Zürich\\n{x}"}')
_SUM, _PAGE = Message("tool", "4.5", call_id="probecal1"), Message("tool", "A page\n of text.", call_id="probecal2")
_CALLS = Message("assistant", "", calls=(_ADD,))
_LOOKS = Message("assistant", "", calls=(_LOOK,))

PROBES: dict[str, list[list[Message]]] = {
    "chat": [
        [_USER, _ANSWER, _MORE, Message("assistant", "Fünf, 六. 🙂"), _MORE],
        [Message("user", "a\n\nb"), Message("assistant", "1. one\n2. two\n\n```py\nx = 1\n```"), _MORE, _ANSWER, _USER],
    ],
    "empty turns": [[_USER, Message("assistant", ""), _MORE, _ANSWER, _USER]],
    "thoughts": [[_USER, _THOUGHT, _MORE, _THOUGHT, _USER], [_USER, _ANSWER, _MORE, _THOUGHT, _USER]],
    "tools": [[_USER, _CALLS, _SUM, _LOOKS, _PAGE, _ANSWER], [_USER, _LOOKS, _PAGE]],
    "parallel calls": [[_USER, Message("assistant", "", calls=(_ADD, _LOOK)), _SUM, _PAGE, _ANSWER]],
    "text beside calls": [[_USER, Message("assistant", "Let me see.", calls=(_LOOK,)), _PAGE, _ANSWER]],
    "thoughts before calls": [
        [_USER, Message("assistant", "", "I should add.", (_ADD,)), _SUM, _THOUGHT],
    ],
    "questions after results": [
        [_USER, _CALLS, _SUM, _ANSWER, _MORE, _LOOKS, _PAGE, _ANSWER, _MORE],
        [_USER, _CALLS, _SUM, _MORE, _ANSWER, _USER],
    ],
    "results after text": [[_USER, Message("assistant", "A call that is {"), _SUM, _ANSWER, _MORE]],  # a malformed call
}
"""Conversations by the feature that they probe."""

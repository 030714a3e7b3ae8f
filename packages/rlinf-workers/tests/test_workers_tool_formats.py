"""Each family's calls are read from the policy's text, and what is none is malformed, with what is wrong."""

import json

import pytest
from workers_chat_templates import deepseek

from rlinf_workers.agents.tool_formats.base import MalformedCall, format_of_template
from rlinf_workers.agents.tool_formats.deepseek import DeepSeek
from rlinf_workers.agents.tool_formats.glm import Glm
from rlinf_workers.agents.tool_formats.hermes import Hermes
from rlinf_workers.agents.tool_formats.llama3 import Llama3
from rlinf_workers.agents.tool_formats.mistral import Mistral
from rlinf_workers.agents.tool_formats.plain import Plain
from rlinf_workers.agents.tool_formats.tagged import Tagged

TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"properties": {"q": {"type": "string"}, "n": {"type": "integer"}}}},
    },
    {"type": "function", "function": {"name": "calc", "parameters": {"properties": {"sum": {"type": "string"}}}}},
]
BEGIN, END = deepseek("tool▁calls▁begin"), deepseek("tool▁calls▁end")
ONE, SEP, DONE = deepseek("tool▁call▁begin"), deepseek("tool▁sep"), deepseek("tool▁call▁end")


def read(reader, text):
    """Content, and for each call its name and arguments, or what is wrong with it."""
    reading = reader.read(text, TOOLS)
    return reading.content, [
        one.problem if isinstance(one, MalformedCall) else (one.name, json.loads(one.arguments))
        for one in reading.calls
    ]


FIND = '{"name": "find", "arguments": {"q": "ä", "n": 2}}'
TAGGED = (
    "<tool_call>\n<function=find>\n<parameter=q>\n12\nb\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>12</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
FENCED = f'{ONE}function{SEP}find\n```json\n{{"n": 1}}\n```{DONE}\n{ONE}function{SEP}now\n```json\n{{}}\n```{DONE}'
CALLS = {"q": "ä", "n": 2}


@pytest.mark.parametrize(
    ("reader", "text", "content", "calls"),
    [
        (Hermes(), f"Hm.\n<tool_call>\n{FIND}\n</tool_call>", "Hm.", [("find", CALLS)]),
        (Hermes(), f"<tool_call>{FIND}</tool_call>\n<tool_call>{FIND}</tool_call>", "", [("find", CALLS)] * 2),
        (Hermes(), f"a\n<tool_call>{FIND}</tool_call>\nb", "a\n\nb", [("find", CALLS)]),
        (Tagged(), TAGGED, "", [("find", {"q": "12\nb", "n": 2})]),
        (Glm(), "x\n" + GLM, "x", [("find", {"q": "12", "n": 2})]),
        (Glm(), "<tool_call>now\n</tool_call>", "", [("now", {})]),
        (Llama3(), '{"name": "find", "parameters": {"n": 2}}', "", [("find", {"n": 2})]),
        (Llama3(), '<|python_tag|>{"name": "a"}; {"name": "b"}', "", [("a", {}), ("b", {})]),
        (Llama3(), '{"answer": 3}', '{"answer": 3}', []),
        (Mistral(), f"[TOOL_CALLS] [{FIND}, {FIND}]", "", [("find", CALLS)] * 2),
        (
            Mistral(),
            '[TOOL_CALLS]find[ARGS]{"n": 1}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}',
            "",
            [("find", {"n": 1}), ("now", {})],
        ),
        (DeepSeek(fenced=False), f'So{BEGIN}{ONE}find{SEP}{{"n": 1}}{DONE}{END}', "So", [("find", {"n": 1})]),
        (
            DeepSeek(fenced=True),
            BEGIN + FENCED + END,
            "",
            [("find", {"n": 1}), ("now", {})],
        ),
        (Plain(), "2+2=[calc:2+2]", "2+2=", [("calc", {"sum": "2+2"})]),
        (Plain(), "[find:x[0]]", "", [("find", {"input": "x[0]"})]),
        (Plain(), "[1,2]", "[1,2]", []),
    ],
)
def test_calls_are_read(reader, text, content, calls):
    assert read(reader, text) == (content, calls)


@pytest.mark.parametrize(
    ("reader", "text", "problem"),
    [
        (Hermes(), "<tool_call>{'name': 1}</tool_call>", "it is no JSON"),
        (Hermes(), '<tool_call>{"arguments": {}}</tool_call>', 'no JSON object with a "name"'),
        (
            Hermes(),
            '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
            "its arguments are no JSON object but [1]",
        ),
        (Hermes(), f"<tool_call>{FIND}", "</tool_call> is missing"),
        (Tagged(), "<tool_call>find</tool_call>", "it is no <function=NAME>"),
        (Tagged(), "<tool_call><function=find>oops</function></tool_call>", "'oops' is no <parameter=KEY>"),
        (Glm(), "<tool_call><arg_key>q</arg_key></tool_call>", "does not begin with the name"),
        (Glm(), "<tool_call>find\n<arg_key>q</arg_key></tool_call>", "is no <arg_key>"),
        (Llama3(), '{"name": "find", "parameters": ', "it is no JSON"),
        (Llama3(), "<|python_tag|>", "nothing follows"),
        (Mistral(), "[TOOL_CALLS] [{]", "it is no JSON"),
        (Mistral(), "[TOOL_CALLS] {}", "it is no list of calls"),
        (DeepSeek(fenced=False), f"{BEGIN}{ONE}find{SEP}{{}}{DONE}", f"{END} is missing"),
        (DeepSeek(fenced=False), f"{BEGIN}{END}", "nothing follows"),
        (DeepSeek(fenced=True), f"{BEGIN}{ONE}function{SEP}find{DONE}{END}", "not between ```json and ```"),
        (Plain(), "2+2=[calc:2+2", "it does not end the turn with ]"),
    ],
)
def test_what_begins_like_a_call_and_is_none_is_malformed(reader, text, problem):
    content, calls = read(reader, text)
    assert problem in calls[0]
    assert text.strip() in content  # the harness sees what the policy wrote


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ '<tool_call>' }}{% if message.tool_calls %}", "hermes"),
        ("<tool_call><function=x>{{ message.tool_calls }}", "tagged"),
        ("<tool_call><arg_key>{{ message.tool_calls }}", "glm"),
        ("{{ '<|start_header_id|>' }}{{ '\"parameters\": ' }}{{ message.tool_calls }}", "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        (f"{SEP}```json", "deepseek-v3"),
        (SEP, "deepseek-v3.1"),
        ("<|im_start|>{{ message.content }}", None),
        ("<function_call>{{ message.tool_calls }}", None),
    ],
)
def test_a_format_is_chosen_by_the_marks_of_the_template_and_never_guessed(source, name):
    chosen = format_of_template(source)
    assert (chosen.name if chosen else None) == name

"""Twenty conversations for chat templates: tools, calls in parallel, thoughts, unicode, empty turns, long histories.

Others than those with which a template is verified when it is loaded.
"""

from __future__ import annotations

import json
from typing import Any

Conversation = tuple[list[dict[str, Any]], bool]
"""Messages in OpenAI's chat form, and whether tools are declared."""


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("weather", "Weather of a place.", place={"type": "string"}, days={"type": "integer"}),
    _tool("run_python", "Runs a program.", code={"type": "string"}),
    _tool(
        "order", "Orders things.", things={"type": "array", "items": {"type": "object"}}, express={"type": "boolean"}
    ),
    _tool("now", "The time."),
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str, *calls: tuple[str, dict[str, Any]], thoughts: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {
                "id": f"conv0{index:04d}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


def tool(text: str, call: int = 0) -> dict[str, Any]:
    """The result of a call of the turn before."""
    return {"role": "tool", "content": text, "tool_call_id": f"conv0{call:04d}"}


_BERN = ("weather", {"place": "Bern", "days": 3})
_PROGRAM = ("run_python", {"code": 'def f(x):\n    return "a\\n" + x  # {"b": 1}\n\nprint(f(\'<y>\'))'})
_ORDER = ("order", {"things": [{"name": "tea", "n": 2}, {"name": "Käse", "n": 1.5}], "express": False})
_NOW = ("now", {})

CONVERSATIONS: dict[str, Conversation] = {
    "one question": ([user("Who wrote Faust?"), assistant("Goethe."), user("When?")], False),
    "system and two questions": (
        [system("Answer briefly."), user("Hi!"), assistant("Hello."), user("Bye!"), assistant("See you."), user("?")],
        False,
    ),
    "unicode": (
        [
            user("Übersetze: 你好, мир 🌍"),
            assistant("Hallo, Welt 🌍 — e\u0301 ≠ é"),
            user("ありがとう"),
            assistant("نعم"),
            user("ok"),
        ],
        False,
    ),
    "code and blank lines": (
        [
            user("Write it.\n\n\nPlease."),
            assistant("```py\nfor x in y:\n\tprint(x)\n\n\n```\n\nDone:\n- a\n- b"),
            user("\tmore"),
        ],
        False,
    ),
    "empty turn": (
        [user("Say nothing."), assistant(""), user("And now?"), assistant("Something."), user("Ok.")],
        False,
    ),
    "empty question": ([user(""), assistant("Yes?"), user("Nothing."), assistant("Fine."), user("")], False),
    "long history": (
        [
            message
            for index in range(15)
            for message in (user(f"Question {index}: {'why ' * index}?"), assistant(f"Answer {index}. " * (index + 1)))
        ]
        + [user("The end?")],
        False,
    ),
    "text that looks like marks": (
        [user("What is <tool>{x}</tool> & [INST]?"), assistant('{"a": [1, 2]} and <b>bold</b>'), user("[/y] {{ z }}")],
        False,
    ),
    "thoughts": ([user("17 * 3?"), assistant("51.", thoughts="17 * 3 = 51."), user("Sure?")], False),
    "thoughts over several questions": (
        [
            user("a?"),
            assistant("A.", thoughts="It is a.\n\nSurely."),
            user("b?"),
            assistant("B.", thoughts="Ähnlich."),
            user("c?"),
            assistant("C."),
            user("d?"),
        ],
        False,
    ),
    "one call": (
        [user("Weather in Bern?"), assistant("", _BERN), tool("rain"), assistant("It rains."), user("Bye")],
        True,
    ),
    "one call, no answer yet": (
        [system("Use tools."), user("Weather?"), assistant("", _BERN), tool("rain\nsun")],
        True,
    ),
    "a chain of calls": (
        [
            user("Plan it."),
            assistant("", _BERN),
            tool("rain"),
            assistant("", _PROGRAM),
            tool("Traceback:\n  line 1\nError: 'x'"),
            assistant("", _ORDER),
            tool('{"ok": true, "id": 7}'),
            assistant("", _BERN),
            tool(""),
            assistant("Done."),
        ],
        True,
    ),
    "calls in parallel": (
        [user("All."), assistant("", _BERN, _PROGRAM, _ORDER), tool("1"), tool("2", 1), tool("3", 2), assistant("Ok.")],
        True,
    ),
    "calls in parallel, then a question": (
        [
            system("Be quick."),
            user("Both."),
            assistant("", _BERN, _ORDER),
            tool("a"),
            tool("b", 1),
            assistant("There."),
            user("Again."),
            assistant("", _BERN, _NOW),
            tool("c"),
            tool("d", 1),
        ],
        True,
    ),
    "text beside a call": (
        [user("Weather?"), assistant("One moment, please.", _BERN), tool("sun"), assistant("Sun."), user("Thanks")],
        True,
    ),
    "thoughts before calls": (
        [
            user("Weather?"),
            assistant("", _BERN, thoughts="I do not know; I should ask."),
            tool("sun"),
            assistant("", _NOW, thoughts="And the time?"),
            tool("noon"),
            assistant("Sun at noon.", thoughts="All there."),
            user("Thanks"),
        ],
        True,
    ),
    "tools that are not called": (
        [user("Hi"), assistant("Hello, what may I do?"), user("Nothing."), assistant("Good."), user("Bye")],
        True,
    ),
    "a question after a result": (
        [user("Weather?"), assistant("", _BERN), tool("sun"), user("In Zürich, I mean."), assistant("Ah."), user("?")],
        True,
    ),
    "arguments of every type": (
        [
            user("Order."),
            assistant("", _ORDER),
            tool("[1, 2]"),
            assistant("", _PROGRAM),
            tool('a "b" \\ c\n'),
            assistant("x"),
        ],
        True,
    ),
}

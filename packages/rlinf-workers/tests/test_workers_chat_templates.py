"""Chat templates are continued with the tokens that a rendering of everything has, or refused with what differs."""

import asyncio
import json
from typing import Any, Literal

import pytest
from transformers import PreTrainedTokenizerFast
from workers_chat_templates import FAMILIES, GLM, family_template, template_of
from workers_sessions import ADD, CHATML, LIMITS, Script, byte_level, characters

from rlinf_workers.agents.messages import RequestRefused, read_messages, read_tools
from rlinf_workers.agents.sessions import AgentSession
from rlinf_workers.agents.templates import PlainTemplate, TemplateRefused, ToolsRefused, template_of_folder
from rlinf_workers.agents.templates.verification import turn_text

ASK = {"role": "user", "content": "Und 2 + 3?\n\n六"}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"properties": {"place": {"type": "string"}, "deep": {"type": "object"}}},
    },
}
TOOLS = [ADD, LOOK]


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": "abcdefgh1", "type": "function", "function": function}


def calls(*some, content="", **fields):
    return {"role": "assistant", "content": content, "tool_calls": list(some), **fields}


def answer(content, **fields):
    return {"role": "assistant", "content": content, **fields}


RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": 'a "result"\n5'}
CONVERSATIONS = {
    "questions": ([ASK, answer("Fünf."), ASK, answer("```\nx\n```"), ASK], []),
    "an empty turn": ([ASK, answer(""), ASK], []),
    "calls": (
        [ASK, calls(call("add", a=2, b=3)), RESULT, calls(call("look", place="1", deep={"x": [1]})), RESULT],
        TOOLS,
    ),
    "a call and an answer": ([ASK, calls(call("add", a=2, b=3.5)), RESULT, answer("Fünf."), ASK], TOOLS),
}


def play(template, conversation):
    """Prompts of a session whose policy writes the turns of the conversation, and renderings of the same histories by
    transformers."""
    messages, tools = conversation
    source, special, end = template.source, template.text.added, template.text.special["eos_token"]
    reference = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(sorted(special, key=special.__getitem__)),
        chat_template=source,
        bos_token="<bos>",
        eos_token=end,
    )
    records, declared = read_messages(messages), read_tools(tools)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    replies = []
    for turn in turns:
        following = next((place for place in turns if place > turn), len(messages))
        suffix = template.suffix_text(records[:following], declared, turn + 1)
        end_text = template.text.positions(suffix, template.end_texts)[0]
        replies.append(turn_text(template, records[: turn + 1], declared) + end_text)
    script = Script(template, [*replies, ""], end="")
    session = AgentSession("s", template, script, LIMITS)
    history, rendered = [], []
    turn: Any = None
    for message in [*messages, None]:
        if message is not None and message["role"] != "assistant":
            history.append({**message, "tool_call_id": turn.tool_calls[0].id} if message["role"] == "tool" else message)
            continue
        (turn,) = asyncio.run(session.chat(history, tools=tools))
        rendered.append(
            reference.apply_chat_template(
                as_templates_want(template, history),
                tools=tools or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        )
        history.append(turn.message())
    return script.prompts, rendered, session


def as_templates_want(template, history):
    if template.arguments_as_text:
        return history
    history = json.loads(json.dumps(history))
    for message in history:
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    return history


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3", "mistral")])
def test_a_continued_conversation_has_the_tokens_of_a_whole_rendering(family, conversation):
    template = family_template(family)
    prompts, rendered, session = play(template, CONVERSATIONS[conversation])
    assert prompts == rendered
    assert dict(template.declared) == {} and not any(node.differs for node in session.trajectory().nodes)


def test_a_tool_loop_of_mistral_has_the_tokens_of_a_whole_rendering_until_the_tools_move():
    template = family_template("mistral")
    prompts, rendered, _ = play(template, CONVERSATIONS["calls"])
    assert prompts == rendered
    prompts, rendered, session = play(template, CONVERSATIONS["a call and an answer"])
    assert prompts[:-1] == rendered[:-1] and prompts[-1] != rendered[-1]
    assert "tools" in template.declared and session.counts["declared_tools"] == 2
    assert template.text.decode(prompts[-1]).count("[AVAILABLE_TOOLS]") == 2


def test_thoughts_that_a_template_drops_later_stay_as_they_were_served():
    template = family_template("qwen3")
    conversation = ([ASK, answer("Fünf.", reasoning_content="2 + 3"), ASK], [])
    prompts, rendered, session = play(template, conversation)
    assert prompts[0] == rendered[0] and prompts[1] != rendered[1]
    assert "2 + 3\n</think>" in template.text.decode(prompts[1])
    assert "thoughts" in template.declared and session.counts["declared_thoughts"] == 1
    assert template.refused == {}


def test_thoughts_that_a_harness_removes_begin_a_branch_unless_it_may():
    cases: list[tuple[Literal["branch", "continue"], int]] = [("branch", 1), ("continue", 0)]
    for missing, branches in cases:
        template = family_template("qwen3")
        script = Script(template, ["<think>\nhm\n</think>\n\nFünf.", "ok"])
        session = AgentSession("s", template, script, LIMITS, missing_thoughts=missing)
        (turn,) = asyncio.run(session.chat([ASK]))
        assert (turn.reasoning, turn.content) == ("hm", "Fünf.")
        asyncio.run(session.chat([ASK, answer("Fünf."), ASK]))
        assert session.counts["roots"] == branches
        differs = [node.differs for node in session.trajectory().nodes if node.differs]
        assert differs == ["message 1 (assistant): thoughts 'hm' went missing"][:branches]


def test_the_end_of_a_turn_may_be_the_role_that_follows():
    template = family_template("glm")
    script = Script(template, ["Fünf.<|user|>", "..."], end="")
    session = AgentSession("s", template, script, LIMITS)
    (turn,) = asyncio.run(session.chat([ASK]))
    assert turn.content == "Fünf."
    asyncio.run(session.chat([ASK, turn.message(), ASK]))
    text = template.text.decode(script.prompts[1])
    assert text.count("<|user|>") == 2 and text.endswith("Fünf.<|user|>\nUnd 2 + 3?\n\n六<|assistant|>")


def test_a_template_that_depends_on_later_messages_is_refused_with_what_differs():
    source = CHATML.replace("'<|im_start|>user\\n' +", "'<|im_start|>user ' ~ loop.revindex ~ '\\n' +")
    with pytest.raises(TemplateRefused, match=r"what opens the turn differs at character 17: '1\\nWhat"):
        template_of(source)


def test_a_template_that_changes_answers_is_refused_with_what_differs():
    source = CHATML.replace("+ message.content }}\n{%- for call", "+ message.content | upper }}\n{%- for call")
    with pytest.raises(TemplateRefused, match=r"the template does not show each answer|reads back otherwise"):
        template_of(source)


def test_a_template_without_an_end_token_is_refused():
    with pytest.raises(TemplateRefused, match="does not begin with a token that is added to the tokenizer"):
        template_of("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}")


def test_tools_of_an_unknown_format_are_refused_while_chat_is_served():
    source = CHATML.replace("<tool_call>", "<my_call>").replace("</tool_call>", "</my_call>")
    template = template_of(source)
    records = read_messages([ASK])
    assert template.prompt(records, ())
    with pytest.raises(ToolsRefused, match="the marks of no known format of calls"):
        template.prompt(records, read_tools(TOOLS))


def test_tools_whose_calls_read_back_otherwise_are_refused_with_what_differs():
    source = CHATML.replace("(call.function.arguments | tojson)", "'{}'")
    template = template_of(source)
    with pytest.raises(ToolsRefused, match=r"tools: .*reads back otherwise: call 0: arguments"):
        template.prompt(read_messages([ASK]), read_tools(TOOLS))


def test_a_second_call_is_malformed_where_the_template_has_one():
    template = family_template("llama3")
    assert "one call at a time" in template.refused["parallel calls"]
    text = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'
    read = template.read(template.text.encode(text), read_tools(TOOLS), [])
    assert [bool(one.malformed) for one in read.calls] == [False, True]
    assert "one call at a time" in read.calls[1].malformed


def test_what_a_template_says_of_messages_is_the_error():
    source = CHATML + "{% if messages | length > 7 %}{{ raise_exception('too long for me') }}{% endif %}"
    with pytest.raises(RequestRefused, match="cannot show these messages: too long for me"):
        template_of(source).prompt(read_messages([ASK] * 8), ())


def test_options_are_variables_of_the_template():
    source = CHATML.replace("'<|im_start|>user\\n' +", "'<|im_start|>user\\n' + (mood or '') + '>' +")
    template = template_of(source, options={"mood": "calm"})
    tokens = [token for piece in template.prompt(read_messages([ASK]), ()) for token in piece.token_ids]
    assert template.text.decode(tokens).startswith("<|im_start|>user\ncalm>Und")


def test_a_folder_gives_its_template_and_a_folder_without_one_the_plain_template(tmp_path):
    byte_level(["<|im_start|>", "<|im_end|>"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    template: Any = template_of_folder(tmp_path)
    assert template.text.end_id in template.ends and template.format.name == "hermes"
    plain = tmp_path / "plain"
    plain.mkdir()
    characters().save(str(plain / "tokenizer.json"))
    assert isinstance(template_of_folder(plain), PlainTemplate)
    with pytest.raises(TemplateRefused, match="has no chat template that could have the options mood"):
        template_of_folder(plain, {"mood": "calm"})
    with pytest.raises(TemplateRefused, match=r"tokenizer\.json does not exist"):
        template_of_folder(tmp_path / "nowhere")


def test_glm_marks_are_those_of_its_family():
    assert "<arg_key>" in GLM and family_template("glm").format.name == "glm"
    assert {name: family_template(name).format.name for name in FAMILIES if name not in ("qwen3", "glm")} == {
        name: name for name in FAMILIES if name not in ("qwen3", "glm")
    }

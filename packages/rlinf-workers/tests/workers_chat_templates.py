"""Small chat templates, each in the published format of a family, written for tests."""

from typing import Any

from workers_sessions import CHATML, byte_level

from rlinf_workers.agents.templates import JinjaTemplate, TokenText

BAR = "\uff5c"


def deepseek(name):
    """A special token of DeepSeek."""
    return f"<{BAR}{name}{BAR}>"


QWEN3 = CHATML.replace(
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + message.content }}",
    """{%- elif message.role == 'assistant' %}
{%- set last = namespace(user=-1) %}
{%- for one in messages %}{% if one.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user %}{{ '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}""",
)
"""Thoughts before the last question are dropped."""
TAGGED = CHATML.replace(
    """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}""",
    """{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}""",
)
"""The calls of Qwen 3.5."""
LLAMA3 = """{{ bos_token }}
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{%- if tools %}{{ head('system') }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}{{ head('ipython') + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}{{ head(message.role) + (message.content | trim) + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""
MISTRAL = """{{ bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for one in messages %}{% if one.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ message.content + eos_token }}{% endif %}
{%- endfor %}"""
"""The tools stand before the last question."""
GLM = """[gMASK]<sop>{% if tools %}{{ '<|system|>\\n' + (tools | tojson) }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ '<|' + message.role + '|>\\n' + (message.content | trim) }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""What ends a turn is the role of what follows."""
DEEPSEEK = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ 'USER' + message.content + 'ASSISTANT' }}
{%- elif message.role == 'assistant' %}{{ message.content }}
{%- if message.tool_calls %}{{ 'CALLS_BEGIN' }}
{%- for call in message.tool_calls %}
{{- 'CALL_BEGIN' + call.function.name + 'SEP' + call.function.arguments + 'CALL_END' }}
{%- endfor %}{{ 'CALLS_END' }}{% endif %}{{ eos_token }}
{%- elif message.role == 'tool' %}{{ 'OUTPUT_BEGIN' + message.content + 'OUTPUT_END' }}
{%- else %}{{ message.content }}{% endif %}{% endfor %}"""
"""V3.1; its calls have their arguments as text."""
for _word, _name in {
    "CALLS_BEGIN": "tool▁calls▁begin",
    "CALLS_END": "tool▁calls▁end",
    "CALL_BEGIN": "tool▁call▁begin",
    "CALL_END": "tool▁call▁end",
    "SEP": "tool▁sep",
    "OUTPUT_BEGIN": "tool▁output▁begin",
    "OUTPUT_END": "tool▁output▁end",
    "USER": "User",
    "ASSISTANT": "Assistant",
}.items():
    DEEPSEEK = DEEPSEEK.replace(f"'{_word}'", f"'{deepseek(_name)}'")

_CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]
_LLAMA_TOKENS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
_MISTRAL_TOKENS = [f"[{slash}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for slash in ("", "/")]
_GLM_TOKENS = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]
_DEEPSEEK_TOKENS = ["User", "Assistant", "end▁of▁sentence", "tool▁sep"]
_DEEPSEEK_TOKENS += [f"tool▁{kind}▁{place}" for kind in ("calls", "call", "output") for place in ("begin", "end")]
FAMILIES = {
    "hermes": (CHATML, _CHATML_TOKENS, "<|im_end|>"),
    "qwen3": (QWEN3, _CHATML_TOKENS, "<|im_end|>"),
    "tagged": (TAGGED, _CHATML_TOKENS, "<|im_end|>"),
    "llama3": (LLAMA3, _LLAMA_TOKENS, "<|eot_id|>"),
    "mistral": (MISTRAL, [*_MISTRAL_TOKENS, "[TOOL_CALLS]", "</s>"], "</s>"),
    "glm": (GLM, _GLM_TOKENS, "<|endoftext|>"),
    "deepseek-v3.1": (DEEPSEEK, [deepseek(name) for name in _DEEPSEEK_TOKENS], deepseek("end▁of▁sentence")),
}
"""Template, special tokens, and which of them ends a text."""


def family_template(name, **arguments) -> Any:
    """The template of a family, with a tokenizer that has its special tokens."""
    source, special, end = FAMILIES[name]
    return template_of(source, special, end, **arguments)


def template_of(source, special=tuple(_CHATML_TOKENS), end="<|im_end|>", **arguments) -> Any:
    text = TokenText(byte_level([*special, "<bos>"]), {"bos_token": "<bos>", "eos_token": end})
    return JinjaTemplate(text, source, **arguments)

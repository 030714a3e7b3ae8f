"""A scripted source of tokens and tokenizers with the special tokens of a family, for tests of sessions."""

import asyncio
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rlinf_workers.agents.records import Sampled
from rlinf_workers.agents.sessions import AgentSession, SessionLimits
from rlinf_workers.agents.templates import JinjaTemplate, PlainTemplate, TokenText

CHATML = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Tools, each called as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML with the calls of Hermes."""
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
LIMITS = SessionLimits(max_turns=None, max_context_tokens=100_000, max_new_tokens=1000)


def byte_level(special):
    """A tokenizer whose tokens are bytes, pairs of letters, and these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("i", "n"), ("e", "r"), ("o", "n")]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(one + other for one, other in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def characters(alphabet="abcdefghijklmnopqrstuvwxyz0123456789+=[]{}:,. "):
    """The tokenizer of tiny models: a token a character, `<end>` and `<unk>`."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<end>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<end>", "<unk>"])
    return tokenizer


def chatml_template():
    return JinjaTemplate(
        TokenText(byte_level(["<|im_start|>", "<|im_end|>", "<|endoftext|>"]), {"eos_token": "<|im_end|>"}), CHATML
    )


def plain_template():
    return PlainTemplate(TokenText(characters(), {"eos_token": "<end>"}))


class Script:
    """Answers every request with the next of its replies, and keeps what it was asked.

    Args:
        replies: a text; one that ends in `...` is cut off by the limit and has no end token.
        end: text of the end token.
    """

    def __init__(self, template, replies, *, end="<|im_end|>", delay_s=0.0):
        self._template, self._replies, self._end, self._delay_s = template, list(replies), end, delay_s
        self.prompts, self.limits, self.seeds, self.agents = [], [], [], []
        self.served = []
        self.num_cancelled = 0

    async def sample(self, session, token_ids, *, max_new_tokens, seed, agent):
        self.prompts.append(list(token_ids))
        self.limits.append(max_new_tokens)
        self.seeds.append(seed)
        self.agents.append(agent)
        reply = self._replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        try:
            await asyncio.sleep(self._delay_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        truncated = reply.endswith("...")
        ids = self._template.text.encode(reply.removesuffix("...") + ("" if truncated else self._end))
        sampled = Sampled(
            token_ids=ids,
            logprobs=[-0.125 * (1 + index % 7) for index in range(len(ids))],
            versions=[(len(ids), 3)],
            truncated=truncated,
        )
        self.served.append(sampled)
        return sampled


def chatml_session(replies, **arguments):
    """A session and its script."""
    template = chatml_template()
    script = Script(template, replies)
    return AgentSession("s", template, script, arguments.pop("limits", LIMITS), **arguments), script


def texts(session):
    """(author, text, parent) of every node."""
    decode = session.template.text.decode
    return [(node.author, decode(node.token_ids), node.parent) for node in session.trajectory().nodes]

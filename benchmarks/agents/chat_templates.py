"""Published chat templates: does a session continue a conversation with the tokens that rendering all of it gives?

    python -m benchmarks.agents.chat_templates FOLDER [FOLDER ...]

Each folder holds templates as FILE.jinja. For every template, each conversation of conversations.py is played through a
session whose policy writes its turns as the template shows them. Every prompt that the session asks tokens for is
compared with transformers' `apply_chat_template` of the whole history, encoded at once. An outcome is

    equal       the same tokens
    declared    other tokens, where a rule of the family that the template declares is all that differs
    refused     the template, or what the conversation needs of it, is refused with a message
    different   anything else: a silent difference, of which there must be none

There are two tokenizers, since no published ones are here: byte-level BPE as Qwen's and Llama 3's, and a BPE with byte
fallback and a mark for spaces as Llama 2's; each with the special tokens that the template names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.agents.conversations import CONVERSATIONS, TOOLS, Conversation
from benchmarks.harness import report
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlinf_workers.agents.messages import RequestRefused, read_messages, read_tools
from rlinf_workers.agents.records import Sampled
from rlinf_workers.agents.sessions import AgentSession, SessionLimits
from rlinf_workers.agents.templates import JinjaTemplate, TemplateRefused, TokenText
from rlinf_workers.agents.templates.verification import features_of, rules_between, turn_text

BAR = "\uff5c"
MARK = re.compile(
    rf"<\|[\w/]+\|>|<{BAR}[^{BAR}\n']+{BAR}>|\[/?[A-Z_]{{3,}}\]|</?s>|<(?:start|end)_of_turn>|<(?:bos|eos)>|</?think>"
    r"|</?tool_(?:call|response)s?>|<sop>|\[gMASK\]|<\|[a-z_]+>|<[a-z_]+\|>|<image>"
)
"""How families write special tokens."""
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", f"<{BAR}end▁of▁sentence{BAR}>")
ENDS += ("<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "<|endoftext|>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers split a text (their tokenizer.json)."""
LIMITS = SessionLimits(max_turns=None, max_context_tokens=1 << 20, max_new_tokens=1 << 16)


def byte_level(special: Sequence[str], corpus: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def byte_fallback(special: Sequence[str], corpus: Sequence[str]) -> Tokenizer:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=["<unk>", *names], show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in corpus], trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


class WritesTheTemplate:
    """A policy that writes the next turn of a conversation as the template shows it."""

    def __init__(self, template: JinjaTemplate, conversation: Conversation) -> None:
        self._template, self._tools = template, read_tools(TOOLS) if conversation[1] else ()
        self._messages = read_messages(conversation[0])
        self._turns = [place for place, message in enumerate(self._messages) if message.role == "assistant"]
        self.prompts: list[list[int]] = []
        self.answers: list[str] = []

    async def sample(
        self, session: str, token_ids: Sequence[int], *, max_new_tokens: int | None, seed: int | None, agent: str
    ) -> Sampled:
        self.prompts.append(list(token_ids))
        if len(self.prompts) > len(self._turns):  # after the conversation
            return Sampled(token_ids=[0], logprobs=[0.0], versions=[(1, 0)])
        place = self._turns[len(self.prompts) - 1]
        answer = turn_text(self._template, self._messages[: place + 1], self._tools)
        self.answers.append(answer)
        last = place == len(self._messages) - 1
        suffix = "" if last else self._template.suffix_text(self._messages[: self._next(place)], self._tools, place + 1)
        end = self._template.text.positions(suffix, self._template.end_texts)
        text = answer + (end.group() if end else self._template.end_texts[0])
        opened = self._template.text.decode(token_ids)
        whole, before = self._template.text.encode(opened + text), self._template.text.encode(opened)
        ids = (
            whole[len(before) :]
            if whole[: len(before)] == list(token_ids) == before
            else self._template.text.encode(text)
        )
        return Sampled(token_ids=ids, logprobs=[0.0] * len(ids), versions=[(len(ids), 0)])

    def _next(self, place: int) -> int:
        return next((turn for turn in self._turns if turn > place), len(self._messages))


async def outcome(template: JinjaTemplate, reference: PreTrainedTokenizerFast, conversation: Conversation) -> str:
    """`equal`, `declared: RULES`, `refused: WHY` or `different: WHAT`."""
    messages, has_tools = conversation
    for feature in features_of(read_messages(messages), TOOLS if has_tools else ()):
        if feature in template.refused:
            return f"refused: {feature}"
    policy = WritesTheTemplate(template, conversation)
    session = AgentSession("s", template, policy, LIMITS)
    tools = TOOLS if has_tools else []
    history: list[dict[str, Any]] = []
    rules: Counter[str] = Counter()
    calls: list[str] = []
    for message in [*messages, None]:
        if message is not None and message["role"] != "assistant":
            if message["role"] == "tool":
                message = {**message, "tool_call_id": calls[int(message["tool_call_id"][-4:])]}
            history.append(message)
            continue
        if message is None and history[-1]["role"] == "assistant":
            break
        try:
            (turn,) = await session.chat(history, tools=tools)
        except RequestRefused as refusal:
            return f"refused: {str(refusal).partition(':')[0]}"
        rendered = render(reference, template, history, tools)
        expected = reference(rendered, add_special_tokens=False)["input_ids"]
        if expected != policy.prompts[-1]:
            served = template.text.decode(policy.prompts[-1])
            rules.update(differing(template, served, rendered))
            if not rules or not set(rules) <= set(template.declared):
                return f"different: {dict(rules)} in a history of {len(history)} messages"
        if message is not None and turn.content.strip() != message["content"].strip():
            return f"different: the turn {message['content'][:40]!r} was read as {turn.content[:40]!r}"
        history.append(turn.message())
        calls = [call.id for call in turn.tool_calls]
    return f"declared: {', '.join(sorted(rules))}" if rules else "equal"


def differing(template: JinjaTemplate, served: str, rendered: str) -> list[str]:
    """Declared rules that explain a difference."""
    whole = template.text.decode(template.text.encode(rendered))
    return ["merge"] if served == whole else rules_between(template, served, whole)


def render(
    reference: PreTrainedTokenizerFast, template: JinjaTemplate, history: list[dict[str, Any]], tools: list[Any]
) -> str:
    """The whole history by transformers."""
    messages = [dict(message) for message in history]
    for message in messages:
        if "tool_calls" in message and not template.arguments_as_text:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
    text = reference.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return text


def compare(path: Path, tokenizer_of: Any, corpus: Sequence[str]) -> dict[str, Any]:
    """Outcomes of all conversations with one template."""
    source = path.read_text(encoding="utf-8")
    special = sorted(set(MARK.findall(source)))
    end = next((token for token in ENDS if token in special), "</s>")
    special = sorted({*special, end, "<bos>"})
    tokenizer = tokenizer_of(special, corpus)
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=source, bos_token="<bos>", eos_token=end, unk_token="<unk>"
    )
    try:
        template = JinjaTemplate(TokenText(reference), source)
    except TemplateRefused as refusal:
        return {"refused": str(refusal), "outcomes": dict.fromkeys(CONVERSATIONS, "refused: template")}
    outcomes = {
        name: asyncio.run(outcome(template, reference, conversation)) for name, conversation in CONVERSATIONS.items()
    }
    calls = template.format.name if template.format else "none"
    return {"calls": calls, "declared": list(template.declared), "refuses": template.refused, "outcomes": outcomes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="results/chat-templates.json by default")
    arguments = parser.parse_args()
    paths = sorted(path for folder in arguments.folders for path in folder.glob("*.jinja"))
    corpus = [path.read_text(encoding="utf-8") for path in paths[:12]]
    templates: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for path in paths:
        for tokenizer_of in (byte_level, byte_fallback):
            result = compare(path, tokenizer_of, corpus)
            here = Counter(text.partition(":")[0] for text in result["outcomes"].values())
            counts += here
            templates[f"{path.stem}, {tokenizer_of.__name__}"] = result
            print(
                f"{path.stem:34} {tokenizer_of.__name__:14} {dict(here)} {result.get('refused', '')[:90]}", flush=True
            )
            for name, text in result["outcomes"].items():
                if text.startswith("different"):
                    print(f"    {name}: {text}")
    served = [name for name, result in templates.items() if "refused" not in result]
    print(f"{len(paths)} templates, {len(served) / 2:g} served, x {len(CONVERSATIONS)} conversations: {dict(counts)}")
    report(
        "chat-templates",
        settings={"templates": [path.stem for path in paths], "conversations": list(CONVERSATIONS)},
        samples_s={},
        comparisons=[],
        findings={"counts": counts, "templates": templates},
        output=arguments.output,
    )


if __name__ == "__main__":
    main()

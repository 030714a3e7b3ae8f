"""From a problem to the tokens that the model is given: plain text or the tokenizer's chat template, and prompts that
are too long."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rlinf.errors import UserError
from rlinf.tasks.base import Sifted, TaskProblem

LongPrompts = Literal["stop", "keep_end", "drop"]

THINK = "<think>"
MAX_OPENING = 64
"""Characters at the end of a prompt among which a begun thought is looked for."""
_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")

BATCH = 512
"""Prompts tokenized at once."""
BATCH_CHARACTERS = 1 << 20
"""And their characters, but for one that is longer alone: tokenizers take 200 times the memory of a text."""


def template_of(template: str, field: str) -> Callable[[str], str]:
    """Fills `{question}`, or `{field}`, of a plain template; doubled braces stand for single ones."""
    return lambda text: template.format_map({"question": text, field: text})


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the tokenizer's files hold a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def is_chat(prompt_format: str, tokenizer: Any) -> bool:
    """Whether prompts of that format (auto, plain or chat) go through the tokenizer's chat template."""
    return prompt_format == "chat" or (prompt_format == "auto" and has_chat_template(tokenizer))


def _begun(text: str) -> str:
    """A thought that a text ends in, without a word of it yet; a closed one for models that are not to think."""
    begun = _THOUGHT.search(text[-MAX_OPENING:])
    return begun[0] if begun else ""


def first_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text by itself, a token that begins a text for example; empty where it puts
    nothing. An end token behind the text is not among it."""
    for example in ("a", "1", "="):
        whole, text = tokenizer(example)["input_ids"], tokenizer(example, add_special_tokens=False)["input_ids"]
        starts = range(len(whole) - len(text) + 1 if text else 0)
        for start in starts:
            if whole[start : start + len(text)] == text:
                return list(whole[:start])
    return []


class PromptEncoder:
    """Turns prompts into tokens. A plain prompt begins as the tokenizer begins every text; a chat template writes such
    tokens itself.

    Args:
        tokenizer: the model's.
        chat: wrap each prompt as the user's message of a conversation, with the tokenizer's own template, up to where
            the assistant begins to answer.
        system_prompt: a first message of the system; only with `chat`.
        options: further arguments of the template, {"enable_thinking": False} for example.
        key: how messages call the setting.
    Raises: UserError where the tokenizer has no chat template, or the template refuses the messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool = False,
        system_prompt: str | None = None,
        options: Mapping[str, Any] | None = None,
        key: str = "prompt_format",
    ) -> None:
        if chat and not has_chat_template(tokenizer):
            raise UserError(
                f"{key}=chat: the tokenizer of the model has no chat template",
                hint=f"use --{key} plain, or put a chat_template into the model folder's tokenizer files "
                "(an instruct model has one, a base model often none)",
            )
        self._tokenizer = tokenizer
        self.is_chat = chat
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
        self._options = dict(options or {})
        self._key = key
        self._opening = self._chat_opening() if chat else ""
        self._first = [] if chat else first_tokens(tokenizer)

    def describe(self) -> str:
        """The format, for people."""
        if self.is_chat:
            return "the tokenizer's chat template"
        first = "".join(self._tokenizer.convert_ids_to_tokens(self._first))
        begins = f"; each begins with {first}, as the tokenizer begins every text" if first else ""
        return f"plain prompts, the tokenizer has no chat template{begins}"

    def text(self, prompt: str) -> str:
        """What the model reads, special tokens written out."""
        if not self.is_chat:
            return prompt
        return self._render(prompt, add_generation_prompt=True)

    def _render(self, prompt: str, *, add_generation_prompt: bool) -> str:
        messages = [*self._system, {"role": "user", "content": prompt}]
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._options
            )
        except Exception as error:  # templates are programs in jinja2 and raise what they like
            what = "a system prompt" if self._system else "the prompt"
            raise UserError(
                f"{self._key}=chat: the tokenizer's chat template refuses {what}: {type(error).__name__}: {error}",
                hint="leave the system prompt out, or use the plain format",
            ) from error

    def opening(self, prompt: str) -> str:
        """What the prompt has begun of the completion: from `<think>` on in what the template writes for the assistant,
        or at the end of a plain prompt. Empty where nothing is begun.

        Example: "<think>\\n" for DeepSeek-R1's template, "<think>\\n\\n</think>\\n\\n" for Qwen3 without thinking.
        """
        return self._opening if self.is_chat else _begun(prompt)

    def _chat_opening(self) -> str:
        """The same for every prompt."""
        text, user = self.text("?"), self._render("?", add_generation_prompt=False)
        turn = text[len(user) :] if text.startswith(user) else ""
        return turn[turn.index(THINK) :] if THINK in turn else _begun(text)

    def encode(self, prompt: str, max_tokens: int | None = None) -> list[int]:
        """Token ids. A prompt that is longer than `max_tokens` loses its beginning, but for the tokens that begin every
        text."""
        token_ids = next(self._encode_all([prompt]))
        if max_tokens is None or len(token_ids) <= max_tokens:
            return token_ids
        first = self._first if max_tokens > len(self._first) else []
        return [*first, *token_ids[len(token_ids) - max_tokens + len(first) :]]

    def num_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Length of each prompt in tokens."""
        return [len(token_ids) for token_ids in self._encode_all(prompts)]

    def num_with_unknown(self, prompts: Sequence[str]) -> int:
        """Prompts with text that the tokenizer has no token for, so that the model cannot read it."""
        unknown = self._tokenizer.unk_token_id
        return 0 if unknown is None else sum(unknown in token_ids for token_ids in self._encode_all(prompts))

    def _encode_all(self, prompts: Sequence[str]) -> Iterator[list[int]]:
        for texts in _batches(map(self.text, prompts)):
            for token_ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]:
                has_first = token_ids[: len(self._first)] == self._first  # the text itself may hold them
                yield token_ids if has_first else [*self._first, *token_ids]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in their order, at most `BATCH` and about `BATCH_CHARACTERS` at once."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        if batch and (len(batch) == BATCH or num_characters + len(text) > BATCH_CHARACTERS):
            yield batch
            batch, num_characters = [], 0
        batch.append(text)
        num_characters += len(text)
    if batch:
        yield batch


def fit_prompts(
    problems: Sequence[TaskProblem],
    encoder: PromptEncoder,
    *,
    max_prompt_tokens: int,
    long_prompts: LongPrompts,
    what: str,
    key: str = "task.long_prompts",
    limit_key: str = "rollout.max_prompt_tokens",
    reason: str = "",
) -> Sifted:
    """Applies the rule for prompts that are too long.

    Args:
        long_prompts: stop: an error; drop: without them; keep_end: all, and whoever encodes cuts the beginning off.
        what: the set, as notes and messages call it.
        key, limit_key: how messages call the settings.
        reason: where the limit comes from.
    Raises: UserError.
    """
    lengths = encoder.num_tokens([problem.prompt for problem in problems])
    fitting = [problem for problem, length in zip(problems, lengths, strict=True) if length <= max_prompt_tokens]
    num_long = len(problems) - len(fitting)
    if not num_long:
        return Sifted(problems=fitting, num_found=0, notes=())
    counts = f"{num_long} of {len(problems)} prompts are longer than {max_prompt_tokens} tokens (up to {max(lengths)})"
    text = f"{what}: {counts}{reason}"
    allow = "use fewer new tokens" if reason else f"allow them with --{limit_key} {max(lengths)}"
    if long_prompts == "stop":
        first = next(problem for problem, length in zip(problems, lengths, strict=True) if length > max_prompt_tokens)
        raise UserError(
            f"{text}, the first at {first.place or 'number 1'}",
            hint=f"{allow}, or use --{key} drop (without these problems) or "
            "keep_end (the beginning of the prompt is cut off); either is counted",
        )
    if long_prompts == "keep_end":
        return Sifted(problems=list(problems), num_found=num_long, notes=(f"{text}; their beginnings were cut off",))
    if not fitting:
        raise UserError(f"{text}, so none is left with {key}=drop", hint=allow)
    return Sifted(problems=fitting, num_found=num_long, notes=(f"{text}; these problems were dropped",))

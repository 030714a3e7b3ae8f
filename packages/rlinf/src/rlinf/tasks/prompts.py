"""Turns problems into prompts, as plain text or with the tokenizer's chat template, and handles long prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from rlinf.config.evaluation import EvalConfig
from rlinf.config.supervised import ExamplesConfig
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.tasks.base import SYSTEM_ROLES, Sifted, TaskProblem, Turns
from rlinf.tasks.spooled import SpooledRows

if TYPE_CHECKING:
    from rlinf_workers.roles import Prompt

LongPrompts = Literal["stop", "keep_end", "drop"]

THINK = "<think>"
MAX_OPENING = 64
"""Characters at the end of a prompt that are searched for an open `<think>`."""
_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")

BATCH = 512
"""Prompts tokenized at once."""
BATCH_CHARACTERS = 1 << 20
"""Characters tokenized at once, except single longer prompts: tokenizers need 200 times the memory of a text."""


def template_of(template: str, field: str) -> Callable[[str], str]:
    """Returns a function that fills `{question}`, or `{field}`, in a template; doubled braces become single ones."""
    return lambda text: template.format_map({"question": text, field: text})


def has_chat_template(tokenizer: Any) -> bool:
    """Returns whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def is_chat(prompt_format: str, tokenizer: Any) -> bool:
    """Returns whether prompts of this format (auto, plain or chat) use the tokenizer's chat template."""
    return prompt_format == "chat" or (prompt_format == "auto" and has_chat_template(tokenizer))


def _begun(text: str) -> str:
    """Returns the empty thought at the end of a text: an open `<think>`, or a closed one for models without
    thinking."""
    begun = _THOUGHT.search(text[-MAX_OPENING:])
    return begun[0] if begun else ""


def first_tokens(tokenizer: Any) -> list[int]:
    """Returns the tokens that the tokenizer adds before every text, for example a begin token; may be empty. End tokens
    are not included."""
    for example in ("a", "1", "="):
        whole, text = tokenizer(example)["input_ids"], tokenizer(example, add_special_tokens=False)["input_ids"]
        starts = range(len(whole) - len(text) + 1 if text else 0)
        for start in starts:
            if whole[start : start + len(text)] == text:
                return list(whole[:start])
    return []


class PromptEncoder:
    """Turns prompts into tokens. Plain prompts get the tokenizer's begin tokens; chat templates write them themselves.

    Args:
        tokenizer: the model's.
        chat: wrap each prompt as the user's message in the tokenizer's chat template, up to the start of the
            assistant's answer.
        system_prompt: system message at the start; only with `chat`.
        options: further arguments of the template, for example {"enable_thinking": False}.
        key: name of the setting, for messages.
    Raises: UserError if the tokenizer has no chat template, or the template rejects the messages.
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
        """Describes the format."""
        if self.is_chat:
            return "the tokenizer's chat template"
        first = "".join(self._tokenizer.convert_ids_to_tokens(self._first))
        begins = f"; each begins with {first}, as the tokenizer begins every text" if first else ""
        return f"plain prompts, the tokenizer has no chat template{begins}"

    def text(self, prompt: str | Turns) -> str:
        """Returns the text that the model reads, including special tokens.

        Raises: UserError for the turns of a chat where prompts are plain.
        """
        if not self.is_chat:
            return prompt if isinstance(prompt, str) else self._refuse_turns()
        return self.render(prompt, add_generation_prompt=True)

    def _refuse_turns(self) -> NoReturn:
        raise UserError(
            "the data hold the turns of chats, and prompts are plain",
            hint=f"use a model whose tokenizer has a chat template, with --{self._key} auto or chat",
        )

    def messages(self, prompt: str | Turns) -> list[dict[str, str]]:
        """Returns the messages that the chat template is given, with the system prompt."""
        turns = (("user", prompt),) if isinstance(prompt, str) else prompt
        system = [] if any(role in SYSTEM_ROLES for role, _ in turns) else self._system
        return [*system, *({"role": role, "content": text} for role, text in turns)]

    @property
    def options(self) -> Mapping[str, Any]:
        """Further arguments of the chat template."""
        return self._options

    def render(self, prompt: str | Turns, *, add_generation_prompt: bool) -> str:
        """Returns the text of a chat, with or without the beginning of the assistant's next turn. Raises: UserError
        where the template refuses it."""
        messages = self.messages(prompt)
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._options
            )
        except Exception as error:  # templates are jinja2 programs and may raise any exception
            what = "a system prompt" if self._system and messages[0] == self._system[0] else "the prompt"
            raise UserError(
                f"{self._key}=chat: the tokenizer's chat template refuses {what}: {type(error).__name__}: {error}",
                hint="leave the system prompt out, or use the plain format",
            ) from error

    def opening(self, prompt: str | Turns) -> str:
        """Returns the part of the completion that the prompt already contains: from `<think>` on in the template's
        assistant part, or at the end of a plain prompt; else empty.

        Example: "<think>\\n" for DeepSeek-R1's template, "<think>\\n\\n</think>\\n\\n" for Qwen3 without thinking.
        """
        return self._opening if self.is_chat else _begun(self.text(prompt))

    def _chat_opening(self) -> str:
        """Returns the opening of chat prompts, which is the same for every prompt."""
        text, user = self.text("?"), self.render("?", add_generation_prompt=False)
        turn = text[len(user) :] if text.startswith(user) else ""
        return turn[turn.index(THINK) :] if THINK in turn else _begun(text)

    def encode(self, prompt: str | Turns, max_tokens: int | None = None) -> list[int]:
        """Returns token ids. A prompt longer than `max_tokens` loses its beginning, but not the begin tokens."""
        token_ids = next(self._encode_all([prompt]))
        if max_tokens is None or len(token_ids) <= max_tokens:
            return token_ids
        first = self._first if max_tokens > len(self._first) else []
        return [*first, *token_ids[len(token_ids) - max_tokens + len(first) :]]

    def prompt(
        self,
        index: int,
        problem: TaskProblem,
        *,
        max_tokens: int | None,
        sends_row: bool,
        sends_messages: bool = False,
    ) -> Prompt:
        """Returns a problem as the rollout reads it.

        Args:
            index: its key on every channel of the run.
            max_tokens: as for `encode`; None: all prompts have one length.
            sends_row: whether the reward or a harness reads the columns of the data row.
            sends_messages: whether an agent goes on with the conversation.
        """
        import torch

        from rlinf_workers.roles import Prompt

        return Prompt(
            index=index,
            token_ids=torch.tensor(self.encode(problem.content, max_tokens)),
            reference_answer=problem.answer,
            text=problem.prompt,
            opening=self.opening(problem.content),
            row_json=problem.row_json if sends_row else None,
            messages_json=json.dumps(self.messages(problem.content)) if sends_messages else None,
        )

    def num_tokens(self, prompts: Iterable[str | Turns]) -> list[int]:
        """Returns the length of each prompt in tokens."""
        return [len(token_ids) for token_ids in self._encode_all(prompts)]

    def num_with_unknown(self, prompts: Iterable[str | Turns]) -> int:
        """Counts the prompts with text that the tokenizer has no token for."""
        unknown = self._tokenizer.unk_token_id
        return 0 if unknown is None else sum(unknown in token_ids for token_ids in self._encode_all(prompts))

    def _encode_all(self, prompts: Iterable[str | Turns]) -> Iterator[list[int]]:
        for texts in _batches(map(self.text, prompts)):
            for token_ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]:
                has_first = token_ids[: len(self._first)] == self._first  # the text itself may contain them
                yield token_ids if has_first else [*self._first, *token_ids]


def make_encoder(
    settings: FilesTask | EvalConfig | ExamplesConfig, tokenizer: Any, model: Path | None, prefix: str = ""
) -> PromptEncoder:
    """The encoder of prompts in the format that the settings ask for.

    Args:
        model: folder of the tokenizer, for messages.
        prefix: what the settings' keys begin with in messages: "task.".
    Raises: UserError where a chat is asked for, and the tokenizer has no template.
    """
    chat = is_chat(settings.prompt_format, tokenizer)
    if not chat and (settings.system_prompt is not None or settings.chat_options):
        key = "chat_options" if settings.system_prompt is None else "system_prompt"
        raise UserError(
            f"{prefix}{key} is set, but the tokenizer of {model} has no chat template",
            hint="leave it out, or put a chat_template into the tokenizer's files",
        )
    return PromptEncoder(
        tokenizer,
        chat=chat,
        system_prompt=settings.system_prompt,
        options=settings.chat_options,
        key=f"{prefix}prompt_format",
    )


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields the texts in order, at most `BATCH` and about `BATCH_CHARACTERS` at once."""
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
    problems: SpooledRows[TaskProblem],
    encoder: PromptEncoder,
    *,
    max_prompt_tokens: int,
    long_prompts: LongPrompts,
    what: str,
    key: str = "task.long_prompts",
    limit_key: str = "rollout.max_prompt_tokens",
    reason: str = "",
) -> Sifted:
    """Applies the rule for long prompts.

    Args:
        long_prompts: stop: raise an error; drop: leave them out; keep_end: keep all, encoding cuts off the beginning.
        what: name of the set, for notes and messages.
        key, limit_key: names of the settings, for messages.
        reason: where the limit comes from.
    Raises: UserError.
    """
    lengths = encoder.num_tokens(problem.content for problem in problems)
    places = [place for place, length in enumerate(lengths) if length <= max_prompt_tokens]
    num_long = len(problems) - len(places)
    if not num_long:
        return Sifted(problems=problems, num_found=0, notes=())
    counts = f"{num_long} of {len(problems)} prompts are longer than {max_prompt_tokens} tokens (up to {max(lengths)})"
    text = f"{what}: {counts}{reason}"
    allow = "use fewer new tokens" if reason else f"allow them with --{limit_key} {max(lengths)}"
    if long_prompts == "stop":
        first = problems[next(place for place, length in enumerate(lengths) if length > max_prompt_tokens)]
        raise UserError(
            f"{text}, the first at {first.place or 'number 1'}",
            hint=f"{allow}, or use --{key} drop (without these problems) or "
            "keep_end (the beginning of the prompt is cut off); either is counted",
        )
    if long_prompts == "keep_end":
        return Sifted(problems=problems, num_found=num_long, notes=(f"{text}; their beginnings were cut off",))
    if not places:
        raise UserError(f"{text}, so none is left with {key}=drop", hint=allow)
    return Sifted(problems=problems.subset(places), num_found=num_long, notes=(f"{text}; these problems were dropped",))

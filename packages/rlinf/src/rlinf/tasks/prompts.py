"""Turns problems into prompts, as plain text or with the tokenizer's chat template, and handles long prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlinf.config.evaluation import EvalConfig
from rlinf.config.supervised import ExamplesConfig
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.tasks.base import SYSTEM_ROLES, Sifted, TaskProblem, Turns
from rlinf.tasks.pictures import MARKER, VIDEO_MARKER
from rlinf.tasks.spooled import SpooledRows
from rlinf.tasks.videos import PictureOrVideo, ProblemVideo

if TYPE_CHECKING:
    from torch import Tensor

    from rlinf_workers.models import PictureProcessor
    from rlinf_workers.roles import Pictures, Prompt

LongPrompts = Literal["stop", "keep_end", "drop"]

THINK = "<think>"
MAX_OPENING = 64
"""Characters at the end of a prompt that are searched for an open `<think>`."""
_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")

PICTURES_BYTES = 64 << 30
"""Size of the address range for the pictures of prompts; memory is used only as far as those of a step, or of an
evaluation, reach."""
PIXEL_LIMITS = ("min_pixels", "max_pixels")
"""Settings of pictures."""
PICTURE_SETTINGS = (*PIXEL_LIMITS, "video_fps", "max_frames")
"""Those that decide what a model sees."""
PART_TYPES = {MARKER: "image", VIDEO_MARKER: "video"}
"""Marker -> type of the part of a message that stands for it in chat templates."""
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
        pictures: processes the pictures of problems; None: the model reads text alone.
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
        pictures: PictureProcessor | None = None,
        key: str = "prompt_format",
    ) -> None:
        if chat and not has_chat_template(tokenizer):
            raise UserError(
                f"{key}=chat: the tokenizer of the model has no chat template",
                hint=f"use --{key} plain, or put a chat_template into the model folder's tokenizer files "
                "(an instruct model has one, a base model often none)",
            )
        self._tokenizer, self._pictures = tokenizer, pictures
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

    def text(self, problem: TaskProblem | str | Turns) -> str:
        """Returns the text that the model reads, including special tokens and a placeholder for each picture.

        Raises: UserError for the turns of a chat where prompts are plain.
        """
        prompt = problem.content if isinstance(problem, TaskProblem) else problem
        pictures = problem.pictures if isinstance(problem, TaskProblem) else ()
        if self.is_chat:
            return self.render(prompt, add_generation_prompt=True, pictures=pictures)
        if not isinstance(prompt, str):
            raise UserError(
                "the data hold the turns of chats, and prompts are plain",
                hint=f"use a model whose tokenizer has a chat template, with --{self._key} chat",
            )
        return self.with_placeholders(prompt, pictures)

    def with_placeholders(self, text: str, pictures: Sequence[PictureOrVideo]) -> str:
        """Returns a plain text with what the model reads in place of the markers of these pictures."""
        if self._pictures is None:
            return text
        shows = {MARKER: self._pictures.picture_text, VIDEO_MARKER: self._pictures.video_text}
        for marker in {one.marker for one in pictures}:
            text = text.replace(marker, shows[marker])
        return text

    def messages(self, prompt: str | Turns) -> list[dict[str, str]]:
        """Returns the messages of a chat, with the system prompt."""
        turns = (("user", prompt),) if isinstance(prompt, str) else prompt
        system = [] if any(role in SYSTEM_ROLES for role, _ in turns) else self._system
        return [*system, *({"role": role, "content": text} for role, text in turns)]

    @property
    def options(self) -> Mapping[str, Any]:
        """Further arguments of the chat template."""
        return self._options

    def messages_for_template(self, prompt: str | Turns, pictures: Sequence[PictureOrVideo]) -> list[dict[str, Any]]:
        """Returns the messages of a chat as the template of the model reads them. The arguments are those of
        `render`."""
        messages: list[dict[str, Any]] = list(self.messages(prompt))
        if self._pictures is None:
            return messages
        # templates of models that read pictures may drop content that is no list of parts
        return [{**one, "content": _parts(one["content"], pictures)} for one in messages]

    def render(
        self, prompt: str | Turns, *, add_generation_prompt: bool, pictures: Sequence[PictureOrVideo] = ()
    ) -> str:
        """Returns the text of a chat, with or without the beginning of the assistant's next turn.

        Args:
            pictures: what the markers stand for; markers of a kind that is not among them are text.
        Raises: UserError where the template refuses it.
        """
        messages = self.messages_for_template(prompt, pictures)
        begins_with_system = bool(self._system) and self.messages(prompt)[0] == self._system[0]
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._options
            )
        except Exception as error:  # templates are jinja2 programs and may raise any exception
            what = "a system prompt" if begins_with_system else "the prompt"
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
        """Returns the token ids of a prompt without pictures. One longer than `max_tokens` loses its beginning, but not
        the begin tokens."""
        token_ids = next(self._encode_all([prompt]))
        if max_tokens is None or len(token_ids) <= max_tokens:
            return token_ids
        first = self._first if max_tokens > len(self._first) else []
        return [*first, *token_ids[len(token_ids) - max_tokens + len(first) :]]

    def tokens(self, problem: TaskProblem, max_tokens: int | None = None) -> tuple[list[int], Pictures | None]:
        """Returns the token ids of a problem's prompt, and its pictures.

        Args:
            max_tokens: as for `encode`; a prompt with pictures is not cut.
        Raises: UserError for a picture that cannot be decoded, and a prompt with pictures that is longer.
        """
        if not problem.pictures:
            return self.encode(problem.content, max_tokens), None
        processor = self._processor_for(problem.place)
        try:
            token_ids, pictures = processor.insert(next(self._encode_all([problem])), problem.pictures)
        except ValueError as error:
            raise UserError(f"{problem.place or 'a problem'}: {error}") from error
        if max_tokens is not None and len(token_ids) > max_tokens:
            raise UserError(
                f"{problem.place or 'a problem'}: the prompt has {len(token_ids)} tokens with its pictures, and "
                f"{max_tokens} are allowed; pictures are not cut",
                hint="allow more tokens, or reduce pictures with max_pixels and videos with max_frames",
            )
        return token_ids, pictures

    def _processor_for(self, place: str) -> PictureProcessor:
        """Raises: UserError for a model without one."""
        if self._pictures is None:
            raise UserError(
                f"{place or 'a problem'} has pictures or videos, and the model reads text alone",
                hint="use a vision-language model (docs/vision-language.md), or ignore the pictures with "
                "--task.columns.images false and --task.columns.videos false",
            )
        return self._pictures

    def insert(
        self, token_ids: list[int], has_loss: Sequence[bool], pictures: Sequence[PictureOrVideo]
    ) -> tuple[list[int], list[bool], Pictures | None]:
        """Returns the tokens of an example with those of its pictures, which have no loss, and the pictures.

        Args:
            token_ids: with a placeholder for each picture.
        """
        if not pictures:
            return token_ids, list(has_loss), None
        processor = self._processor_for("")
        whole, seen = processor.insert(token_ids, pictures)
        assert seen is not None, "there are some"
        lengths = iter(one.num_tokens for one in seen.pictures)
        loss: list[bool] = []
        for token, has_one in zip(token_ids, has_loss, strict=True):
            loss += [False] * next(lengths) if token in processor.placeholder_ids else [has_one]
        return whole, loss, seen

    def prompt(
        self,
        index: int,
        problem: TaskProblem,
        *,
        max_tokens: int | None,
        sends_row: bool,
        sends_messages: bool = False,
        sends_pictures: bool = False,
    ) -> Prompt:
        """Returns a problem as the rollout reads it.

        Args:
            index: its key on every channel of the run.
            max_tokens: as for `encode`; None: all prompts have one length.
            sends_row: whether the reward or a harness reads the columns of the data row.
            sends_messages: whether an agent goes on with the conversation.
            sends_pictures: whether the reward reads the files of pictures; those of a video are its frames.
        Raises: UserError, as `tokens`.
        """
        import torch

        from rlinf_workers.roles import Prompt

        token_ids, pictures = self.tokens(problem, max_tokens)
        return Prompt(
            index=index,
            token_ids=torch.tensor(token_ids),
            reference_answer=problem.answer,
            text=problem.prompt,
            opening=self.opening(problem.content),
            row_json=problem.row_json if sends_row else None,
            messages_json=json.dumps(self._messages_of(problem, pictures)) if sends_messages else None,
            pictures=pictures,
            picture_files=tuple(_bytes(file) for one in problem.pictures for file in one.files)
            if sends_pictures
            else (),
        )

    def _messages_of(self, problem: TaskProblem, pictures: Pictures | None) -> list[dict[str, Any]]:
        """The messages of a chat in OpenAI's form; pictures have URLs that sessions know."""
        messages: list[dict[str, Any]] = list(self.messages(problem.content))
        if pictures is None:
            return messages
        from rlinf_workers.agents import PICTURE_URL, part_of_url

        urls = iter([PICTURE_URL + one.digest for one in pictures.pictures])
        for message in messages:
            if MARKER in message["content"]:
                parts = _parts(message["content"], problem.pictures)
                message["content"] = [one if one["type"] == "text" else part_of_url(next(urls)) for one in parts]
        return messages

    def num_tokens(self, problems: Iterable[TaskProblem]) -> list[int]:
        """Returns the length of each prompt in tokens, with those of its pictures, which are not decoded.

        Raises: UserError for pictures that the model cannot read, and for placeholders of pictures in a text.
        """
        counted, encoded = tee(problems)
        return [
            len(token_ids) + self.num_picture_tokens(problem.pictures, token_ids, problem.place)
            for problem, token_ids in zip(counted, self._encode_all(encoded), strict=True)
        ]

    def num_picture_tokens(self, pictures: Sequence[PictureOrVideo], token_ids: Sequence[int], place: str) -> int:
        """Returns the number of tokens that pictures add to those of a text with placeholders.

        Raises: UserError for another number of placeholders, and for pictures that the model cannot read.
        """
        if self._pictures is None and not pictures:
            return 0
        processor = self._processor_for(place)
        try:
            num_added = sum(
                processor.num_video_tokens(one.width, one.height, one.sampling) - 1
                if isinstance(one, ProblemVideo)
                else processor.num_tokens(one.width, one.height) - 1
                for one in pictures
            )
        except ValueError as error:  # more than 200 times as long as wide; videos that are not read
            raise UserError(
                f"{place or 'a problem'}: the model's processor refuses a picture or video: {error}"
            ) from error
        try:
            processor.check_placeholders(token_ids, pictures)
        except ValueError as error:
            raise UserError(
                f"{place or 'a problem'}: as the model reads it, {error}",
                hint="the problem's own text must not hold a placeholder, and a chat template has to write one for "
                "each picture and each video",
            ) from error
        return num_added

    def num_with_unknown(self, problems: Iterable[TaskProblem]) -> int:
        """Counts the prompts with text that the tokenizer has no token for."""
        unknown = self._tokenizer.unk_token_id
        return 0 if unknown is None else sum(unknown in token_ids for token_ids in self._encode_all(problems))

    def _encode_all(self, problems: Iterable[TaskProblem | str | Turns]) -> Iterator[list[int]]:
        """Yields the tokens of prompts, with a placeholder for each picture."""
        for texts in _batches(map(self.text, problems)):
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
    limits = {key: getattr(settings, key) for key in PIXEL_LIMITS}
    return PromptEncoder(
        tokenizer,
        chat=chat,
        system_prompt=settings.system_prompt,
        options=settings.chat_options,
        pictures=make_picture_processor(model, tokenizer, limits, prefix),
        key=f"{prefix}prompt_format",
    )


def make_picture_processor(
    model: Path | None, tokenizer: Any, limits: Mapping[str, int | None] | None = None, prefix: str = ""
) -> PictureProcessor | None:
    """What processes pictures for the model of a folder; None for a model that reads text alone.

    Args:
        limits: `min_pixels` and `max_pixels`.
        prefix: as in `make_encoder`.
    Raises: UserError for limits that the model's processor does not have, and for a missing package.
    """
    from rlinf_workers.models import PictureProcessor, reads_pictures

    limits = limits or {}
    if model is None or not reads_pictures(model):
        if unused := [f"{prefix}{key}" for key, value in limits.items() if value is not None]:
            raise UserError(
                f"{' and '.join(unused)} cannot be used: the model {model} reads text alone",
                hint=f"use a vision-language model (docs/vision-language.md), or set {' and '.join(unused)} to null",
            )
        return None
    try:
        return PictureProcessor(str(model), tokenizer, **limits)
    except ImportError as error:
        raise UserError(f"the model {model} reads pictures: {error}", hint="pip install 'rlinf[vision]'") from error
    except ValueError as error:
        hint = f"change {prefix}min_pixels and {prefix}max_pixels, or set them to null for the model's own limits"
        raise UserError(f"{prefix}max_pixels: {error}", hint=hint) from error


def _bytes(file: bytes) -> Tensor:
    """[bytes] uint8"""
    import torch

    return torch.frombuffer(bytearray(file), dtype=torch.uint8)


def _parts(text: str, pictures: Sequence[PictureOrVideo]) -> list[dict[str, str]]:
    """The content of a message as parts, with one of its own in place of each marker of these pictures."""
    markers = {one.marker for one in pictures}
    pieces = re.split(f"({'|'.join(sorted(markers))})", text) if markers else [text]
    return [
        {"type": PART_TYPES[piece]} if piece in markers else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]


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
        long_prompts: stop: raise an error; drop: leave them out; keep_end: keep all, encoding cuts off the beginning,
            but of no prompt with pictures.
        what: name of the set, for notes and messages.
        key, limit_key: names of the settings, for messages.
        reason: where the limit comes from.
    Raises: UserError.
    """
    lengths = encoder.num_tokens(problems)
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
        long = (problems[place] for place, length in enumerate(lengths) if length > max_prompt_tokens)
        if pictured := next((problem for problem in long if problem.pictures), None):
            raise UserError(
                f"{text}; {pictured.place or 'one'} has pictures, which {key}=keep_end would cut",
                hint=f"{allow}, reduce them with max_pixels or max_frames, or use --{key} drop",
            )
        return Sifted(problems=problems, num_found=num_long, notes=(f"{text}; their beginnings were cut off",))
    if not places:
        raise UserError(f"{text}, so none is left with {key}=drop", hint=allow)
    return Sifted(problems=problems.subset(places), num_found=num_long, notes=(f"{text}; these problems were dropped",))

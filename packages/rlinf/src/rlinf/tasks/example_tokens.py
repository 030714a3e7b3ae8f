"""Examples as tokens, with a mask of those that have a loss.

The mask of a chat comes from its template. Where the template marks the assistant's words with `{% generation %}`, that
decides. Otherwise the chat is rendered turn by turn: what the template writes for the first turns has to be the
beginning of what it writes for all of them, and the loss is on what a turn of the assistant adds to the prompt for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlinf.errors import UserError
from rlinf.tasks.base import Turns
from rlinf.tasks.examples import ASSISTANT, ExampleRow
from rlinf.tasks.prompts import PromptEncoder, first_tokens
from rlinf.tasks.spooled import SpooledRows
from rlinf.tasks.videos import PictureOrVideo

_GENERATION = re.compile(r"\{%-?\s*generation\b")


class TokenizedRow(Protocol):
    """An example, or a pair of answers, as tokens."""

    @property
    def num_tokens(self) -> int:
        """Of its longest row in a batch."""
        ...

    @property
    def place(self) -> str:
        """`file.jsonl:12`"""
        ...


T = TypeVar("T", bound=TokenizedRow)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedExample:
    """An example as tokens."""

    token_ids: Tensor
    """[L] int32"""
    has_loss: Tensor
    """[L] bool; False for the first token, which nothing predicts."""
    place: str
    pictures: tuple[PictureOrVideo, ...] = ()
    """What the placeholders among the tokens stand for."""
    num_picture_tokens: int = 0
    """Tokens that they add."""

    @property
    def num_bytes(self) -> int:
        """Memory of its pictures."""
        return sum(picture.num_bytes for picture in self.pictures)

    @property
    def num_tokens(self) -> int:
        """Those of its pictures included."""
        return len(self.token_ids) + self.num_picture_tokens

    @property
    def num_learned(self) -> int:
        """Tokens with a loss."""
        return int(self.has_loss.sum())

    @property
    def parts(self) -> list[tuple[str, Tensor]]:
        """Runs of tokens with a loss, called `loss`, and of those without, for people to read."""
        begins = [0, *(self.has_loss.diff().nonzero()[:, 0] + 1).tolist(), len(self.token_ids)]
        runs = pairwise(begins)
        return [("loss" if self.has_loss[begin] else "", self.token_ids[begin:end]) for begin, end in runs]

    def first(self, num_tokens: int) -> TokenizedExample:
        """The example without the tokens behind the first `num_tokens`. Raises: UserError for one with pictures."""
        if self.pictures:
            raise UserError(
                f"{self.place}: the example has {self.num_tokens} tokens with its pictures, which "
                "task.long_examples=cut would cut",
                hint="allow more with --task.max_tokens, reduce them with --task.max_pixels or "
                "--task.max_frames, or use --task.long_examples drop",
            )
        ids, has_loss = self.token_ids[:num_tokens].clone(), self.has_loss[:num_tokens].clone()
        return TokenizedExample(token_ids=ids, has_loss=has_loss, place=self.place)


class ExampleEncoder:
    """Turns rows into tokens.

    Args:
        encoder: how prompts are written; the same as in training from rewards.
        to_prompt: the template of prompts that are text.
        on_all: tokens of prompts and of other turns have a loss too.
        adds_end: a text that is no chat gets an end token.
        folder: of the model, for messages.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        tokenizer: Any,
        to_prompt: Callable[[str], str],
        *,
        on_all: bool,
        adds_end: bool = True,
        folder: object,
    ) -> None:
        self._encoder, self._tokenizer, self._to_prompt, self._on_all = encoder, tokenizer, to_prompt, on_all
        self._adds_end, self._folder = adds_end, folder
        self._marks_turns = encoder.is_chat and bool(_GENERATION.search(str(tokenizer.chat_template)))
        self.num_apart = 0
        """Chats in which a token would reach across the beginning or the end of an answer, so that their parts were
        tokenized apart."""
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"model.path={folder}: the tokenizer names no end token (eos_token), so no text could end",
                hint="put eos_token into the folder's tokenizer_config.json",
            )

    def encode(self, row: ExampleRow) -> TokenizedExample:
        """Raises: UserError where the chat template refuses it, or does not tell which tokens are the assistant's."""
        if row.turns or (row.prompt is not None and self._encoder.is_chat):
            turns, num_given = row.turns, row.num_given
            if not turns:
                prompt = self._to_prompt(row.prompt or "")
                turns, num_given = (("user", prompt), (ASSISTANT, row.completion)), 1
            token_ids, has_loss = self._chat(turns, num_given, row.pictures)
        else:
            token_ids, has_loss = self._text(row)
        loss = torch.tensor([self._on_all] * len(token_ids) if self._on_all else has_loss)
        loss[:1] = False
        ids = torch.tensor(token_ids, dtype=torch.int32)
        num_more = self._encoder.num_picture_tokens(row.pictures, token_ids, row.place)
        return TokenizedExample(
            token_ids=ids, has_loss=loss, place=row.place, pictures=row.pictures, num_picture_tokens=num_more
        )

    def _text(self, row: ExampleRow) -> tuple[list[int], list[bool]]:
        """The prompt and the completion one after the other, tokenized apart as they are in sampling; an end token."""
        prompt, prompt_ids, completion = row.prompt, [], self._ids(row.completion)
        if prompt is None:
            completion = [*first_tokens(self._tokenizer), *completion]
        else:
            text = self._encoder.with_placeholders(self._to_prompt(prompt), row.pictures)
            prompt_ids = self._encoder.encode(text)
        if self._adds_end and completion[-1:] != [self._tokenizer.eos_token_id]:
            completion = [*completion, self._tokenizer.eos_token_id]
        return [*prompt_ids, *completion], [False] * len(prompt_ids) + [True] * len(completion)

    # -- chats -----------------------------------------------------------------------------------------------------

    def _chat(self, turns: Turns, num_given: int, pictures: Sequence[PictureOrVideo]) -> tuple[list[int], list[bool]]:
        if self._marks_turns:
            return self._marked(turns, num_given, pictures)
        pieces = list(self._pieces(turns, num_given, pictures))
        texts = [text for text, _ in pieces]
        begun = [self._ids("".join(texts[: number + 1])) for number in range(len(texts))]
        whole = begun[-1]
        if any(whole[: len(ids)] != ids for ids in begun):
            self.num_apart += 1
            begun = []
            for text in texts:
                begun.append([*(begun[-1] if begun else ()), *self._ids(text)])
            whole = begun[-1]
        has_loss: list[bool] = []
        for ids, (_, is_answer) in zip(begun, pieces, strict=True):
            has_loss += [is_answer] * (len(ids) - len(has_loss))
        return whole, has_loss

    def _pieces(self, turns: Turns, num_given: int, pictures: Sequence[PictureOrVideo]) -> Iterable[tuple[str, bool]]:
        """Yields the parts of the chat's text, and whether each is the assistant's."""
        render = partial(self._encoder.render, pictures=pictures)
        whole, done = render(turns, add_generation_prompt=False), 0
        for number, (role, _) in enumerate(turns):
            if role != ASSISTANT or number < num_given:
                continue
            before = render(turns[:number], add_generation_prompt=True)
            through = render(turns[: number + 1], add_generation_prompt=False)
            if not (through.startswith(before) and whole.startswith(through)):
                raise self._refusal(number, len(turns))
            yield whole[done : len(before)], False
            yield whole[len(before) : len(through)], True
            done = len(through)
        if done < len(whole):
            yield whole[done:], False

    def _refusal(self, number: int, num_turns: int) -> UserError:
        return UserError(
            f"model.path={self._folder}: its chat template does not keep what it has written when turns follow (turn "
            f"{number + 1} of {num_turns}), so the tokens of the assistant cannot be told from the others",
            hint="mark them in the template, {% generation %} before what the assistant says and {% endgeneration %} "
            "behind it; or train on chats with one answer, if the template keeps those",
        )

    def _marked(self, turns: Turns, num_given: int, pictures: Sequence[PictureOrVideo]) -> tuple[list[int], list[bool]]:
        """By the marks of the template."""
        encoded = self._tokenizer.apply_chat_template(
            self._encoder.messages_for_template(turns, pictures),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._encoder.options,
        )
        token_ids, marks = list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
        if num_given:
            before = self._encoder.render(turns[:num_given], add_generation_prompt=True, pictures=pictures)
            num_before = len(self._ids(before))
            marks[:num_before] = [False] * num_before
        return token_ids, marks

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def fit_examples(
    examples: Sequence[TokenizedExample], max_tokens: int, long_examples: str, what: str
) -> tuple[SpooledRows[TokenizedExample], list[str]]:
    """Applies the rule for long examples, and leaves out those without any token that has a loss.

    Args:
        long_examples: `task.long_examples`.
        what: name of the set, for notes and messages.
    Returns: the examples, and notes about them.
    Raises: UserError.
    """
    return fit_rows(
        examples,
        max_tokens,
        long_examples,
        what,
        cut=TokenizedExample.first,
        is_kept=lambda example: bool(example.has_loss.any()),
        left_out="examples have no token with a loss",
    )


def fit_rows(
    rows: Sequence[T],
    max_tokens: int,
    long_examples: str,
    what: str,
    *,
    cut: Callable[[T, int], T],
    is_kept: Callable[[T], bool],
    left_out: str,
) -> tuple[SpooledRows[T], list[str]]:
    """Applies the rule for long examples, and leaves out those that nothing can be learned from.

    Args:
        cut: returns an example without the tokens at its end that are too many.
        is_kept: whether something can be learned from an example that fits.
        left_out: what the others have in common, for a note; further arguments as in `fit_examples`.
    Returns: the examples, and notes about them.
    Raises: UserError.
    """
    lengths = [row.num_tokens for row in rows]
    notes = _long_notes(lengths, lambda place: rows[place].place, max_tokens, long_examples, what)
    learned: SpooledRows[T] = SpooledRows()
    num_left_out = 0
    for row, length in zip(rows, lengths, strict=True):
        if length > max_tokens and long_examples != "cut":
            continue
        fitting = row if length <= max_tokens else cut(row, max_tokens)
        if is_kept(fitting):
            learned.append(fitting)
        else:
            num_left_out += 1
    if num_left_out:
        notes.append(f"{what}: {num_left_out} {left_out} and were left out")
    if not learned:
        raise UserError(
            f"{what}: no example is left", hint=f"the longest has {max(lengths)} tokens; see task.max_tokens"
        )
    return learned, notes


def _long_notes(
    lengths: Sequence[int], place_of: Callable[[int], str], max_tokens: int, long_examples: str, what: str
) -> list[str]:
    """Returns the notes about examples that are too long.

    Args:
        place_of: number of an example -> its place in a file; other arguments as in `fit_examples`.
    Raises: UserError where they end the run.
    """
    long = [number for number, length in enumerate(lengths) if length > max_tokens]
    if not long:
        return []
    longest = max(lengths)
    text = f"{what}: {len(long)} of {len(lengths)} examples are longer than {max_tokens} tokens (up to {longest})"
    if long_examples == "stop":
        raise UserError(
            f"{text}, the first at {place_of(long[0])}",
            hint=f"allow them with --task.max_tokens {longest}, or use --task.long_examples cut (without the tokens at "
            "the end) or drop (without these examples); either is counted",
        )
    return [f"{text}; {'the rest was cut off' if long_examples == 'cut' else 'they were dropped'}"]

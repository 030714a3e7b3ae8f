"""The rows of a supervised run as items of its steps and evaluations."""

from __future__ import annotations

import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rlinf.config.supervised import SupervisedConfig
from rlinf.errors import UserError
from rlinf.tasks.base import EpochOrder, HasFingerprint, digest_of
from rlinf.tasks.example_tokens import ExampleEncoder, TokenizedRow
from rlinf.tasks.language import load_checkpoint_tokenizer
from rlinf.tasks.prompts import PICTURES_BYTES, PromptEncoder, make_encoder, template_of
from rlinf.tasks.questions import LoadedRows, load_rows
from rlinf.tasks.rows import Row
from rlinf.tasks.spooled import SpooledRows
from rlinf.tasks.videos import PictureOrVideo
from rlinf_workers.roles import PicturePool, Pictures

_LOG = logging.getLogger(__name__)

R = TypeVar("R", bound=HasFingerprint)
T = TypeVar("T", bound=TokenizedRow)


class ItemSource(ABC, Generic[R, T]):
    """The items of a run: rows R, which become tokens T. Each part is created when it is first read, and raises
    UserError if that fails. A subclass defines how a row is read, and what its tokens and items are."""

    rows_of_item = 1
    """Rows of a batch that an item takes."""
    columns_hint: str
    """What to do if no row of a file can be used."""

    def __init__(self, config: SupervisedConfig, *, on_all: bool = False, adds_end: bool = True) -> None:
        self._config, self._on_all, self._adds_end = config, on_all, adds_end
        self.notes: list[str] = []
        """Notes for the user: skipped rows, cut examples."""
        self._order = EpochOrder(config.seed)

    @abstractmethod
    def read(self, row: Row) -> R:
        """Raises: RowError."""

    @abstractmethod
    def columns_of(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns what of a row is used -> its column."""

    @abstractmethod
    def encoded(self, encoder: ExampleEncoder, row: R) -> T:
        """The tokens of a row. Raises: UserError."""

    @abstractmethod
    def fitted(self, examples: Sequence[T], what: str) -> tuple[SpooledRows[T], list[str]]:
        """The examples that fit, and notes about the others. Raises: UserError."""

    @abstractmethod
    def num_tokens(self, one: T) -> int:
        """Its length, by which shards are balanced."""

    def longest_row(self) -> int:
        """The length of the longest row of all examples."""
        return max(one.num_tokens for one in chain(self.training_set, self.held_out))

    @abstractmethod
    def item(self, index: int, one: T, place: int, *, is_held_out: bool) -> Any:
        """The item number `index` of a step or an evaluation.

        Args:
            place: of `one` in its set.
        """

    # -- rows ------------------------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> tuple[SpooledRows[R], SpooledRows[R]]:
        """Those to train on, and those held out of training."""
        task = self._config.task
        train, count = self._load(task.train_files), task.num_held_out
        if task.eval_files:
            return train, self._load(task.eval_files)[:count]
        if count >= len(train):
            raise UserError(
                f"task.num_held_out={count}: task.train_files hold {len(train)} examples, so none is left to train on",
                hint="use fewer, or give other files with --task.eval_files",
            )
        order = list(range(len(train)))
        random.Random(f"held out {self._config.seed}").shuffle(order)
        held_out = set(order[:count])
        self.notes.append(f"task.eval_files is empty: {count} of {len(train)} rows are held out of training")
        return (
            train.subset(index for index in range(len(train)) if index not in held_out),
            train.subset(index for index in range(len(train)) if index in held_out),
        )

    def _load(self, paths: Sequence[Path]) -> SpooledRows[R]:
        parts: list[SpooledRows[R]] = []
        for path in paths:
            loaded = self.load(path)
            parts.append(loaded.items)
            self.notes += loaded.notes
        return SpooledRows.joined(parts)

    def load(self, path: Path) -> LoadedRows[R]:
        """Reads a file, a folder or what else a path stands for. Raises: UserError."""
        return load_rows(
            path,
            self.read,
            on_bad_row=self._config.task.on_bad_row,
            bad_row_key="task.on_bad_row",
            what="example",
            hint_of=lambda values: self.columns_hint,
        )

    def fingerprints(self) -> dict[str, str]:
        """Config key and files of each set -> digest of its rows in order."""
        task = self._config.task
        files = {"train_files": task.train_files, "eval_files": task.eval_files}
        return {
            f"task.{key}={', '.join(map(str, paths))}": digest_of(rows)
            for (key, paths), rows in zip(files.items(), self._rows, strict=True)
        }

    # -- tokens ----------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        return load_checkpoint_tokenizer(self._config.model.path)

    @cached_property
    def encoder(self) -> PromptEncoder:
        return make_encoder(self._config.task, self.tokenizer, self._config.model.path, "task.")

    @cached_property
    def training_set(self) -> SpooledRows[T]:
        return self._encoded(self._rows[0], "task.train_files")

    @cached_property
    def held_out(self) -> SpooledRows[T]:
        return self._encoded(self._rows[1], "task.eval_files" if self._config.task.eval_files else "held-out rows")

    def _encoded(self, rows: Sequence[R], what: str) -> SpooledRows[T]:
        examples, notes = self.fitted(self.tokenize(rows, what), what)
        self.notes += notes
        return examples

    def tokenize(self, rows: Sequence[R], what: str) -> SpooledRows[T]:
        """The tokens of all rows, however long.

        Args:
            what: name of the set, for notes.
        Raises: UserError.
        """
        task = self._config.task
        encoder = ExampleEncoder(
            self.encoder,
            self.tokenizer,
            template_of(task.prompt_template, task.columns.prompt or "question"),
            on_all=self._on_all,
            adds_end=self._adds_end,
            folder=self._config.model.path,
        )
        examples = SpooledRows(self.encoded(encoder, row) for row in rows)
        if encoder.num_apart:
            self.notes.append(
                f"{what}: in {encoder.num_apart} chats a token would reach across the beginning or the end of an "
                "answer; their prompts and answers were tokenized apart, as they are in sampling"
            )
        return examples

    # -- items -----------------------------------------------------------------------------------------------------

    def num_steps(self, num_epochs: float) -> int:
        """Training steps of so many passes over the training examples."""
        return max(1, math.ceil(num_epochs * len(self.training_set) / self._config.actor.batch_size - 1e-9))

    def training(self, step: int) -> list[Any]:
        """The items of a training step. Every epoch visits the examples in a new order, which depends on seed and epoch
        alone."""
        size = self._config.actor.batch_size
        places = [self.place(index) for index in range(step * size, (step + 1) * size)]
        return self.items(places, is_held_out=False)

    def evaluation(self) -> list[Any]:
        return self.items(range(len(self.held_out)), is_held_out=True)

    def inserted(
        self, token_ids: Tensor, has_loss: Tensor, pictures: Sequence[PictureOrVideo]
    ) -> tuple[Tensor, Tensor, Pictures | None]:
        """Tokens, int64, and which of them have a loss, with those of pictures, which are processed now."""
        ids, flags, seen = self.encoder.insert(token_ids.tolist(), has_loss.bool().tolist(), pictures)
        placed = None if seen is None else self._pictures.place_all(seen)
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(flags, dtype=torch.bool), placed

    @cached_property
    def _pictures(self) -> PicturePool:
        """Where pictures are, so that no channel copies them."""
        return PicturePool(_LOG.warning, capacity_bytes=PICTURES_BYTES)

    def place(self, index: int) -> int:
        """The place in the training set of example `index` of the stream."""
        return self._order.place(index, len(self.training_set))

    def items(self, places: Sequence[int], *, is_held_out: bool) -> list[Any]:
        """The items of some places of a set, in their `order`."""
        examples = self.held_out if is_held_out else self.training_set
        return [
            self.item(index, examples[place], place, is_held_out=is_held_out)
            for index, place in enumerate(self.order(places, is_held_out=is_held_out))
        ]

    def order(self, places: Sequence[int], *, is_held_out: bool) -> list[int]:
        """The places in the order in which items are numbered, so that the shards, which take every `num_shards`-th,
        have about equally many tokens. The mean over a step does not depend on the order."""
        examples = self.held_out if is_held_out else self.training_set
        lengths = [self.num_tokens(examples[place]) for place in places]
        return [places[position] for position in dealt(lengths, self._config.actor.resolved_shards)]


def dealt(lengths: Sequence[int], num_shards: int) -> list[int]:
    """The positions of items in the order in which they are numbered: the longest first, dealt to the shards forwards
    and backwards. Item i of it goes to shard i % num_shards.

    Example: lengths [5, 9, 7, 8] for two shards: [1, 3, 0, 2], which are 9 and 5 | 8 and 7.
    """
    longest_first = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    rounds = [longest_first[start : start + num_shards] for start in range(0, len(lengths), num_shards)]
    return [
        position
        for number, round_ in enumerate(rounds)
        for position in (reversed(round_) if number % 2 and len(round_) == num_shards else round_)
    ]

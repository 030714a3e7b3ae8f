"""The task's problems as prompts of the policy: of training steps, of evaluations and of the SFT warm-up."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rlinf.config.reasoning import ReasoningConfig, SftWarmUpConfig
from rlinf.config.rewards import compares_with_answer
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.jobs.rewards import TriedReward, try_rewards
from rlinf.tasks import Task, TaskProblem, make_task
from rlinf.tasks.files import FileProblems
from rlinf.tasks.language import character_tokenizer, load_checkpoint_tokenizer, write_model_folder
from rlinf.tasks.prompts import PICTURES_BYTES, PromptEncoder, make_encoder, make_picture_processor
from rlinf_workers.models import PictureProcessor
from rlinf_workers.roles import ExampleBatch, PicturePool, Pictures, Prompt

_LOG = logging.getLogger(__name__)
WARM_UP_OFFSET = 1 << 40
"""Where the SFT warm-up's problems begin in the training stream: farther than any run trains."""


class PromptSource:
    """The prompts of a run. Each part is created when it is first read, and raises UserError if that fails."""

    def __init__(self, config: ReasoningConfig) -> None:
        self._config = config

    @cached_property
    def unfitted_task(self) -> Task:
        """The task before `task.long_prompts` is applied."""
        reward = self._config.reward
        return make_task(self._config.task, self._config.seed, needs_answer=compares_with_answer(reward))

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer; one token for each character if the model is new."""
        alphabet = self.unfitted_task.alphabet
        if self._config.model.path is not None:
            return load_checkpoint_tokenizer(self._config.model.path)
        if alphabet is not None and (architecture := self._config.model.architecture) is not None:
            return character_tokenizer(alphabet, reads_pictures=architecture.vision_tower is not None)
        raise UserError(
            "model.architecture makes a tokenizer of single characters, but this task is natural language",
            hint="give a Hugging Face folder with model.path",
        )

    @cached_property
    def encoder(self) -> PromptEncoder:
        task = self._config.task
        if not isinstance(task, FilesTask):
            return PromptEncoder(self.tokenizer, pictures=self._picture_processor)
        return make_encoder(task, self.tokenizer, self._config.model.path, "task.")

    @property
    def _picture_processor(self) -> PictureProcessor | None:
        """That of a generated task's model; a new one's is written before there is a run's folder."""
        model, alphabet = self._config.model, self.unfitted_task.alphabet
        if model.architecture is None or model.architecture.vision_tower is None or alphabet is None:
            return make_picture_processor(model.path, self.tokenizer)
        with TemporaryDirectory(prefix="rlinf-model-") as folder:
            write_model_folder(Path(folder), model.architecture, alphabet, model.dtype)
            return make_picture_processor(Path(folder), self.tokenizer)

    @cached_property
    def task(self) -> Task:
        if isinstance(self.unfitted_task, FileProblems):
            self.unfitted_task.fit(self.encoder, self._config.rollout.max_prompt_tokens)
        return self.unfitted_task

    @cached_property
    def held_out(self) -> Mapping[str, Sequence[TaskProblem]]:
        """Sets of problems for evaluation; the one that the score is about comes first, under no name."""
        return self.task.held_out()

    @cached_property
    def tried_reward(self) -> TriedReward:
        """The result of calling the reward once, with the first problem."""
        return try_rewards(self._config.reward, self.task.train_problem(0))

    @property
    def max_tokens(self) -> int | None:
        """Longest prompt. None: all prompts have the same length, because the tokenizer was built for the task."""
        return self._config.rollout.max_prompt_tokens if self._config.model.path else None

    def training(self, first: int, num_prompts: int) -> list[Prompt]:
        """Prompts `first` to `first + num_prompts` of the training stream."""
        return self._prompts(map(self.task.train_problem, range(first, first + num_prompts)))

    def evaluation(self) -> list[Prompt]:
        """Prompts of all held-out sets, one set after the other."""
        return self._prompts(problem for problems in self.held_out.values() for problem in problems)

    def _prompts(self, problems: Iterable[TaskProblem]) -> list[Prompt]:
        encoder, max_tokens, tried = self.encoder, self.max_tokens, self.tried_reward
        is_agent = self._config.rollout.agent is not None
        prompts = [
            encoder.prompt(
                index,
                problem,
                max_tokens=max_tokens,
                sends_row=tried.reads_rows or is_agent,
                sends_messages=is_agent,
                sends_pictures=tried.reads_pictures,
            )
            for index, problem in enumerate(problems)
        ]
        return [
            replace(
                one,
                pictures=self._pictures.place_all(one.pictures),
                picture_files=tuple(map(self._pictures.place_tensor, one.picture_files)),
            )
            if one.pictures is not None
            else one
            for one in prompts
        ]

    @cached_property
    def _pictures(self) -> PicturePool:
        """Where the pictures of prompts are, so that no channel copies them."""
        return PicturePool(_LOG.warning, capacity_bytes=PICTURES_BYTES)

    def examples(self, settings: SftWarmUpConfig, step: int) -> list[ExampleBatch]:
        """One batch, one item per shard, from a range of the problem stream that training steps do not reach."""
        first = WARM_UP_OFFSET + step * settings.batch_size
        rows, masks, pictures = [], [], []
        for index in range(first, first + settings.batch_size):
            problem = self.task.train_problem(index)
            row, mask, seen = self._example(problem, index)
            pictures.append(seen)
            rows.append(torch.tensor(row))
            masks.append(torch.tensor(mask))
        token_ids = pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        loss_mask = pad_sequence(masks, batch_first=True)
        num_shards, has_pictures = self._config.actor.resolved_shards, any(one is not None for one in pictures)
        return [
            ExampleBatch(
                shard=shard,
                token_ids=token_ids[shard::num_shards],
                loss_mask=loss_mask[shard::num_shards],
                pictures=tuple(pictures[shard::num_shards]) if has_pictures else (),
            )
            for shard in range(num_shards)
        ]

    def _example(self, problem: TaskProblem, index: int) -> tuple[list[int], list[float], Pictures | None]:
        """Tokens of a solution, 1.0 for those that the policy writes, and the prompt's pictures. Of several
        conversations it takes one."""
        solutions = problem.solutions or ((("policy", problem.answer),),)
        turns = solutions[index % len(solutions)]
        row, pictures = ([], None) if turns[0][0] == "task" else self.encoder.tokens(problem)
        mask = [0.0] * len(row)
        for author, text in turns:
            turn = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            turn += [self.tokenizer.eos_token_id] * (author == "policy")
            row += turn
            mask += [float(author == "policy")] * len(turn)
        return row, mask, pictures

"""What training and evaluation tell the rollout alike: prompts as tokens, how completions are sampled, the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rlinf.config.engine import EngineConfig
from rlinf.config.evaluation import EvalConfig
from rlinf.config.reasoning import EvaluationConfig, RolloutConfig
from rlinf.config.tasks import FilesTask
from rlinf.doors import named_class
from rlinf.errors import UserError
from rlinf.tasks import Problem
from rlinf.tasks.prompts import PromptEncoder, is_chat
from rlinf_sched.derive.memory import JobShape
from rlinf_sched.derive.memory.sglang import settled_arguments
from rlinf_sched.derive.shapes import ModelShape
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.engines.sglang.arguments import KNOWN_VERSIONS
from rlinf_workers.launchers.interpreter import Interpreter
from rlinf_workers.plugins import ENGINES
from rlinf_workers.records.language import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptMaker:
    """Turns a problem into what the rollout is given."""

    encoder: PromptEncoder
    max_tokens: int | None
    """Longest prompt in tokens. A longer one loses its beginning, because its end asks the question. None: all prompts
    have one length."""
    sends_rows: bool
    """Whether the reward reads the columns of the data row."""

    def all(self, problems: Iterable[Problem]) -> list[Prompt]:
        """Their prompts, numbered from 0."""
        return [self(index, problem) for index, problem in enumerate(problems)]

    def __call__(self, index: int, problem: Problem) -> Prompt:
        return Prompt(
            index=index,
            token_ids=torch.tensor(self.encoder.encode(problem.prompt, self.max_tokens)),
            reference_answer=problem.answer,
            text=problem.prompt,
            opening=self.encoder.opening(problem.prompt),
            row_json=problem.row_json if self.sends_rows else None,
        )


def make_encoder(
    settings: FilesTask | EvalConfig, tokenizer: Any, model: Path | None, prefix: str = ""
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


def sampling_settings(
    settings: RolloutConfig | EvaluationConfig | EvalConfig,
    *,
    group_size: int,
    max_new_tokens: int,
    stop: tuple[str, ...],
) -> SamplingSettings:
    """How the engine samples."""
    return SamplingSettings(
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=stop,
    )


def check_engine(settings: EngineConfig, key: str = "engine") -> None:
    """Whether there is such an engine, and its constructor takes the options.

    Args:
        key: the engine's, for messages.
    Raises: UserError.
    """
    name, given = settings.engine, {"max_prompt_tokens": None, "max_batch_sequences": 1}
    options = {**settings.engine_options, **settings.sglang}
    place = f"{settings.AT}sglang" if settings.sglang else None
    named_class(ENGINES, name, options, None, None, at=f"{key}={name}", options_at=place, **given)


def check_installed(settings: EngineConfig, where: Interpreter | None) -> None:
    """Whether the engine is installed where the rollout runs, in a version that is known.

    Args:
        where: the rollout's environment; None: this process's own.
    Raises: UserError.
    """
    if settings.engine != "sglang":
        return
    found = _version_here("sglang") if where is None else where.packages.get("sglang")
    place = sys.executable if where is None else where.path
    key = f"{settings.AT}engine=sglang"
    if found is None:
        if where is None:
            hint = "rlinf env create sglang (--cpu on CPU slots), then --environments.rollout sglang"
        else:
            hint = "rlinf env create sglang (--cpu on CPU slots) makes one; rlinf env list shows those that are there"
        raise UserError(f"{key}: SGLang is not installed in the environment of {place}", hint=hint)
    if found not in KNOWN_VERSIONS and not settings.sglang.get("any_version"):
        raise UserError(
            f"{key}: the environment of {place} has SGLang {found}; known to work: {', '.join(KNOWN_VERSIONS)}",
            hint=f"rlinf env create sglang, or --{settings.AT}sglang.any_version true to take it as it is",
        )


def _version_here(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def engine_options(settings: EngineConfig, shape: ModelShape | None, job: JobShape) -> dict[str, Any]:
    """Arguments of the engine's constructor; for SGLang server arguments, with the size of its KV pool where the
    settings leave it open.

    Args:
        shape: the model's; None where we cannot count its parts, and the engine decides by itself.
        job: what is asked of a rank.
    """
    if settings.engine != "sglang" or shape is None:
        return dict(settings.options)
    return settled_arguments(shape, job)

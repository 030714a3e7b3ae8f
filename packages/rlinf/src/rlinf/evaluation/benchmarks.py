"""Reads benchmarks from files: problems with prompts that fit, and their rewards."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.config.evaluation import BenchmarkConfig, EvalConfig
from rlinf.errors import UserError
from rlinf.evaluation.model import EvaluatedModel
from rlinf.jobs.rewards import FUNCTIONS, try_own_reward
from rlinf.tasks import TaskProblem
from rlinf.tasks.pictures import PictureReading
from rlinf.tasks.prompts import PromptEncoder, fit_prompts, make_encoder, template_of
from rlinf.tasks.published import PublishedSet, published_set, require_published
from rlinf.tasks.questions import Columns, QuestionReader, load_problems
from rlinf_algos import RewardError
from rlinf_algos.rewards import RewardSpec, close_reward, make_reward, reward_names, score

PLAIN_TEMPLATE = "{question}\n"
"""Default template for custom files."""
CHECKED = ("exact_match", "numeric_match", "math_answer", "multiple_choice")
"""Rewards that can check beforehand whether they can use an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """One benchmark: its problems and its reward."""

    name: str
    title: str
    file: str
    reward: RewardSpec
    problems: Sequence[TaskProblem]
    num_bad_rows: int
    num_long_prompts: int
    notes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Digest of all prompts and answers."""
        digest = hashlib.sha256()
        for problem in self.problems:
            prompt, *pictures = problem.identity
            digest.update(repr((problem.number, prompt, problem.answer, *pictures)).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmarks:
    """All benchmarks of an evaluation."""

    sets: tuple[Benchmark, ...]
    encoder: PromptEncoder
    max_prompt_tokens: int
    """Tokens of the longest encoded prompt."""


def prepare_benchmarks(config: EvalConfig, model: EvaluatedModel) -> Benchmarks:
    """Reads and checks all files. Raises: UserError."""
    published = {name: _published(name, benchmark) for name, benchmark in config.benchmarks.items()}
    limit = _prompt_limit(config, model)
    encoder = make_encoder(config, model.tokenizer, model.folder)
    sets = tuple(_benchmark(config, name, published[name], encoder, limit, model.max_positions) for name in published)
    longest = max(max(encoder.num_tokens(one.problems)) for one in sets)
    return Benchmarks(sets=sets, encoder=encoder, max_prompt_tokens=max(1, min(longest, limit)))


def _published(name: str, benchmark: BenchmarkConfig) -> PublishedSet | None:
    """Returns the published set of a name; None for a custom file, which needs a reward."""
    if benchmark.reward is not None:
        return published_set(name)
    return require_published(
        name,
        hint=f"a file of your own needs a reward: --benchmarks.{name}.reward exact, for example, and "
        f"--benchmarks.{name}.columns.prompt and columns.answer where they are not question and answer",
    )


def _prompt_limit(config: EvalConfig, model: EvaluatedModel) -> int:
    """Returns the maximum prompt length in tokens."""
    if config.agent is not None:
        left = config.agent.max_context_tokens - config.max_new_tokens
        if left < 1:
            raise UserError(
                f"agent.max_context_tokens={config.agent.max_context_tokens} leaves no room for a prompt beside a turn "
                f"of max_new_tokens={config.max_new_tokens}",
                hint="use more, or shorter turns",
            )
        return min(left, config.max_prompt_tokens or left)
    if model.max_positions is None:
        return config.max_prompt_tokens or sys.maxsize
    left = model.max_positions - config.max_new_tokens
    if left < 1:
        raise UserError(
            f"max_new_tokens={config.max_new_tokens} leaves no position for a prompt: the model has "
            f"{model.max_positions}",
            hint=f"use --max_new_tokens {max(1, model.max_positions // 2)}, for example",
        )
    if config.max_prompt_tokens is not None and config.max_prompt_tokens > left:
        raise UserError(
            f"max_prompt_tokens={config.max_prompt_tokens} + max_new_tokens={config.max_new_tokens} is more than the "
            f"model's {model.max_positions} positions",
            hint=f"use --max_prompt_tokens {left} or less, or fewer new tokens",
        )
    return config.max_prompt_tokens or left


def _benchmark(
    config: EvalConfig,
    name: str,
    published: PublishedSet | None,
    encoder: PromptEncoder,
    limit: int,
    positions: int | None,
) -> Benchmark:
    benchmark, title = config.benchmarks[name], published.title if published else name
    rule = FUNCTIONS.get(benchmark.reward or "", benchmark.reward)
    reward = RewardSpec(rule=rule or "")
    if published is not None and rule in (None, published.reward):
        reward = RewardSpec(rule=published.reward, options={**published.reward_options})
    template = benchmark.prompt_template or (published.template if published else PLAIN_TEMPLATE)
    loaded = load_problems(
        benchmark.file,
        _reader(name, benchmark, published),
        template_of(template, "question"),
        on_bad_row=config.on_bad_row,
        bad_row_key="on_bad_row",
        reading=PictureReading.as_set(config),
    )
    fitted = fit_prompts(
        loaded.problems[: benchmark.num_problems],
        encoder,
        max_prompt_tokens=limit,
        long_prompts=config.long_prompts,
        what=title,
        key="long_prompts",
        limit_key="max_prompt_tokens",
        reason=f"; the model has {positions} positions and max_new_tokens={config.max_new_tokens} are kept free"
        if positions is not None and limit == positions - config.max_new_tokens
        else "",
    )
    problems, notes = fitted.problems, [*loaded.notes, *fitted.notes]
    if num_unknown := encoder.num_with_unknown(problems):
        notes.append(
            f"{title}: the tokenizer has no token for some of the text of {num_unknown} of {len(problems)} prompts"
        )
    notes += _check_reward(name, reward, problems)
    return Benchmark(
        name=name,
        title=title,
        file=str(benchmark.file),
        reward=reward,
        problems=problems,
        num_bad_rows=loaded.num_found,
        num_long_prompts=fitted.num_found,
        notes=tuple(notes),
    )


def _check_reward(name: str, reward: RewardSpec, problems: Sequence[TaskProblem]) -> list[str]:
    """Checks before the evaluation that the reward exists and can use all answers. Returns notes.

    Rules are called with an empty completion of each problem; a custom function, which may be slow, only for one.
    """
    if ":" in reward.rule:
        what = f"benchmarks.{name}.reward={reward.rule}"
        if try_own_reward(reward, problems[0], what).judges:
            return []
        return [f"{what} returns numbers: an answer counts as right from 1 on"]
    hint = f"--benchmarks.{name}.reward chooses another reward; known: {', '.join(reward_names())}"
    try:
        checker = make_reward(reward)
    except RewardError as error:
        raise UserError(f"benchmarks.{name}.reward={reward.rule}: {error}", hint=hint) from error
    try:
        for problem in problems if reward.rule in CHECKED else ():
            try:
                score(checker, "", problem.answer)
            except RewardError as error:
                raise UserError(f"{problem.place}: {error.__cause__ or error}", hint=hint) from error
    finally:
        close_reward(checker)
    return []


def _reader(name: str, benchmark: BenchmarkConfig, published: PublishedSet | None) -> QuestionReader:
    columns = benchmark.columns
    if published is not None and columns.prompt is None and columns.answer is None:
        return published.read
    return Columns(
        question=columns.prompt or "question",
        answer=columns.answer or "answer",
        images=columns.images,
        videos=columns.videos,
        keys=(f"benchmarks.{name}.columns.prompt", f"benchmarks.{name}.columns.answer"),
    )

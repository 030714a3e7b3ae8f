"""Config of `rlinf eval`: the model, the benchmarks, prompts and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlinf.config.agents import AgentConfig, agent_by_name
from rlinf.config.base import Conflict, DataPath, ModelPath, Section, Seed
from rlinf.config.common import (
    MIN_P,
    STOP,
    TOP_K,
    TOP_P,
    VENVS,
    ClusterConfig,
    EngineConfig,
    Python,
    Strings,
    venv_conflicts,
)
from rlinf.config.rewards import MAX_JUDGE_FAILURES
from rlinf.config.tasks import chat_conflicts, template_conflicts

RESUMABLE = ("cluster", "max_batch_sequences", "max_judge_failures", "worker_timeout_s", "timeout_s")
"""Keys that may change when an evaluation is resumed; they do not affect the numbers."""


def _file_alone(value: Any) -> Any:
    """Turns a file into a section: `gsm8k: test.jsonl` means `gsm8k: {file: test.jsonl}`."""
    return {"file": value} if isinstance(value, str) else value


def _list_of_k(value: Any) -> Any:
    """Turns command-line text into a tuple: `8` means `[8]` and `1,8` means `[1, 8]`."""
    if isinstance(value, str) and all(part.strip().isdigit() for part in value.split(",")):
        return tuple(int(part) for part in value.split(","))
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class BenchmarkColumns(Section):
    """Names of columns, as in `task.columns`."""

    prompt: str | None = Field(
        default=None, min_length=1, description="Column of the problem; null: as published, else question."
    )
    answer: str | None = Field(
        default=None, min_length=1, description="Column of the answer; null: as published, else answer."
    )
    images: Annotated[str, Field(min_length=1)] | Literal[False] | None = Field(
        default=None, description="Column of the pictures, as task.columns.images."
    )
    videos: Annotated[str, Field(min_length=1)] | Literal[False] | None = Field(
        default=None, description="Column of the videos, as task.columns.videos."
    )


class BenchmarkConfig(Section):
    """One set of problems. A published set needs only its file; other files need a reward too, and the column names
    unless they are question and answer."""

    HUB_USE = "rows"

    file: DataPath = Field(
        description="Data file, folder or pattern, or the name of a data set on the Hub (docs/data.md)."
    )
    reward: str | None = Field(
        default=None,
        description="How completions are scored: exact, numeric, math, multiple_choice, format or code, as reward.kind "
        "in training; a function of rlinf_algos.rewards; or package.module:function. null: the reward of the published "
        "set.",
    )
    columns: BenchmarkColumns = Field(default=BenchmarkColumns(), description="Names of the columns that are read.")
    prompt_template: str | None = Field(
        default=None,
        description="Prompt with {question} where the problem goes; null: the template of the run that trained the "
        "model, or of the published set.",
    )
    num_problems: int | None = Field(
        default=None, ge=1, description="Use only the first problems of the file; null: all."
    )


class EvalConfig(EngineConfig):
    """Everything that decides the numbers of an evaluation."""

    AT = ""

    model: ModelPath = Field(
        description="Model folder, name of a model on the Hub, a run's folder (its newest checkpoint) or one "
        "checkpoint of a run."
    )
    benchmarks: dict[str, Annotated[BenchmarkConfig, BeforeValidator(_file_alone)]] = Field(
        min_length=1, description="Name -> file or section; on the command line NAME=FILE."
    )
    k: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_list_of_k)] = Field(
        default=(1,), min_length=1, description="k of pass@k and maj@k; several as 1,4,8."
    )
    num_samples: int | None = Field(
        default=None,
        ge=1,
        description="Completions of each problem; null: the largest k. avg@k averages over all of them.",
    )
    seed: Seed = Field(default=0, description="Seed of all samples, independent of the number of devices.")
    temperature: float = Field(
        default=0.6, ge=0, description="Sampling temperature; 0: greedy decoding, with one sample only."
    )
    top_p: float = Field(default=0.95, gt=0, le=1, description=TOP_P)
    top_k: int = Field(default=0, ge=0, description=TOP_K)
    min_p: float = Field(default=0.0, ge=0, le=1, description=MIN_P)
    stop: Strings | None = Field(
        default=None, description=STOP + " null: as in the run that trained the model; of another model none."
    )
    max_new_tokens: int = Field(
        default=2048, ge=1, description="Maximum completion length in tokens; longer completions are cut."
    )
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum prompt length in tokens; null: the positions that the model has beyond max_new_tokens.",
    )
    long_prompts: Literal["stop", "keep_end", "drop"] = Field(
        default="stop",
        description="How to treat longer prompts. stop: raise an error. keep_end: cut off the beginning. drop: leave "
        "the problem out. The last two are counted and reported.",
    )
    on_bad_row: Literal["stop", "skip"] = Field(
        default="stop",
        description="How to treat a row that is not a valid problem. stop: raise an error with file and line. "
        "skip: count it and go on.",
    )
    prompt_format: Literal["auto", "plain", "chat"] = Field(
        default="auto",
        description="chat: the prompt as the user's message in the tokenizer's chat template. plain: the prompt "
        "unchanged. auto: as in the run that trained the model; for other models chat if the tokenizer has a template.",
    )
    system_prompt: str | None = Field(default=None, description="System message of a chat; unset: the run's.")
    chat_options: dict[str, bool | int | float | str] = Field(
        default={}, description="Arguments of the chat template, for example {enable_thinking: false}."
    )
    min_pixels: int | None = Field(
        default=None, ge=1, description="As task.min_pixels; unset: as in the run that trained the model."
    )
    max_pixels: int | None = Field(
        default=None, ge=1, description="As task.max_pixels; unset: as in the run that trained the model."
    )
    video_fps: float = Field(
        default=2.0, gt=0, description="As task.video_fps; unset: as in the run that trained the model."
    )
    max_frames: int = Field(
        default=64, ge=1, description="As task.max_frames; unset: as in the run that trained the model."
    )
    fetch_pictures: bool = Field(default=False, description="As task.fetch_pictures.")
    agent: Annotated[AgentConfig | None, BeforeValidator(agent_by_name)] = Field(
        default=None,
        description="Episodes of an agent in place of completions, as rollout.agent in training; unset: the agent of "
        "the run that trained the model, if it had one; null: completions. max_new_tokens is then the limit of a turn.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Type of weights and computation."
    )
    max_batch_sequences: int = Field(
        default=256, ge=1, description="Completions that a device generates at the same time."
    )
    max_judge_failures: float = Field(default=0.5, ge=0, le=1, description=MAX_JUDGE_FAILURES)
    worker_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Heartbeat timeout in seconds: a worker that is stopped or unreachable for this long is lost. A "
        "worker whose process still runs is subject to timeout_s only.",
    )
    timeout_s: float = Field(
        default=86400.0,
        gt=0,
        description="Time limit of a benchmark in seconds; --resume continues a benchmark that exceeded it.",
    )
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="The devices; all are used.")
    venvs: dict[str, Python] = Field(default={}, description=VENVS)

    @property
    def samples_per_problem(self) -> int:
        """Completions of each problem."""
        return self.num_samples or max(self.k)

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        yield from self.length_conflicts((self.max_prompt_tokens or 1) + self.max_new_tokens, "a sequence")
        yield from venv_conflicts(self.venvs, ("rollout", "reward"))
        if self.agent is not None:
            yield from self.agent.engine_conflicts(self)
        if self.num_samples is not None and max(self.k) > self.num_samples:
            yield Conflict(
                keys=("k", "num_samples"),
                text=f"={max(self.k)} is more than num_samples={self.num_samples}; draw at least {max(self.k)} samples "
                "of each problem, or ask for a smaller k",
            )
        if self.samples_per_problem > 1 and self.temperature == 0:
            yield Conflict(
                keys=("temperature", "num_samples", "k"),
                text=f"=0 makes the {self.samples_per_problem} samples of a problem all the same; use a temperature "
                "above 0, for example 0.6, or one sample",
            )
        for name, value in (("top_k", self.top_k), ("min_p", self.min_p)):
            if value and self.temperature == 0:
                yield Conflict(
                    keys=(name, "temperature"),
                    text=f"={value:g} is not used: temperature=0 takes the likeliest token; use a temperature above 0, "
                    "or leave it out",
                )
        if self.prompt_format == "plain":
            yield from chat_conflicts(self.system_prompt, self.chat_options, "")
        for name, benchmark in self.benchmarks.items():
            if benchmark.prompt_template is not None:
                key = f"benchmarks.{name}.prompt_template"
                yield from template_conflicts(benchmark.prompt_template, "question", key, "prompt_template")

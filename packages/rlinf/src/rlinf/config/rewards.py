"""Config of the reward: which rule, test or model scores a completion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rlinf.config.base import Conflict, ModelPath, Section

MAX_JUDGE_FAILURES = (
    "Largest share of a step's completions for which the reward itself may fail (a built-in rule raises an exception, "
    "or a checking process dies). These completions get a reward of 0; the run ends if more fail."
)


class RuleReward(Section):
    """A rule without options; returns 1 or 0."""

    kind: Literal["exact", "numeric", "format", "random", "episode"] = Field(
        description="exact: the text equals the answer. numeric: the last number equals the answer. format: <think> "
        "... </think> <answer> ... </answer> with any content. episode: what the agent returned (rollout.agent). "
        "random: a control, coin flips drawn from the run's seed that carry no learning signal; evaluation stays "
        "exact."
    )


class ChoiceReward(Section):
    """1 if the last letter stated as the answer is the reference's."""

    kind: Literal["multiple_choice"]
    num_choices: int = Field(default=26, ge=2, le=26, description="Number of possible answers, letters from A on.")


class MathRewardConfig(Section):
    """1 if math-verify finds the answer equivalent to the reference; runs in a pool of processes (`rlinf[math]`)."""

    kind: Literal["math"]
    num_processes: int = Field(default=2, ge=1, description="Checking processes; each keeps a CPU core busy.")
    time_limit_s: float = Field(default=1.0, ge=0.01, description="CPU seconds for one comparison.")
    wall_limit_s: float = Field(default=2.0, ge=0.01, description="Wall-clock seconds for one comparison.")
    memory_limit_mib: int = Field(default=1024, ge=128, description="Memory of one checking process.")


class CodeRewardConfig(Section):
    """1 if the last fenced program passes the reference's tests in a sandbox."""

    kind: Literal["code"]
    num_processes: int = Field(default=2, ge=1, description="Programs that run concurrently.")
    wall_limit_s: float = Field(default=10.0, ge=0.1, description="Wall-clock seconds for one run.")
    cpu_limit_s: int = Field(default=5, ge=1, description="CPU seconds for one run, a whole number.")
    memory_limit_mib: int = Field(default=512, ge=64, description="Memory of one run.")
    partial: bool = Field(default=False, description="Reward the share of tests passed instead of 1 or 0.")
    allow_weak_isolation: bool = Field(
        default=False,
        description="Accept the weak sandbox on kernels without namespaces, even if programs can forge their verdict "
        "in it; the manifest records what is open.",
    )


class ModelReward(Section):
    """The score of a reward model (Hugging Face sequence classification)."""

    kind: Literal["model"]
    path: ModelPath = Field(
        description="Model folder (config.json with one label, weights, tokenizer), or its name on the Hub."
    )
    batch_size: int = Field(default=16, ge=1, description="Rows per forward pass.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Longer rows keep only this many tokens at their end; null: the model's limit."
    )


QUESTION = (
    "{prompt}\n\nA proposed answer to this:\n{completion}\n\nThe reference answer:\n{answer}\n\n"
    "Is the proposed answer right? Say Yes or No."
)


class JudgeReward(Section):
    """The verdict of a language model that is asked about the completion; it may see the problem's pictures."""

    kind: Literal["judge"]
    path: ModelPath = Field(
        description="Model folder, or its name on the Hub. A vision-language model sees the pictures of the problem."
    )
    question: str = Field(
        default=QUESTION,
        description="What the model reads; {prompt}, {completion} and {answer} stand for the texts. Pictures are at "
        "the markers of the prompt, or before the prompt.",
    )
    accepts: str = Field(default="Yes", min_length=1, description="Word that begins the answer for a right completion.")
    rejects: str = Field(default="No", min_length=1, description="Word that begins the answer for a wrong completion.")
    graded: bool = Field(
        default=False,
        description="The reward is the probability of `accepts` among both words. false: 1 if that is more than a "
        "half, else 0.",
    )
    max_tokens: int = Field(
        default=16384, ge=1, description="Tokens of a forward pass; a longer question has a pass of its own."
    )
    max_pixels: int | None = Field(
        default=None, ge=1, description="Larger pictures are reduced to this many pixels; null: as the folder says."
    )

    def conflicts(self) -> Iterator[Conflict]:
        if "{completion}" not in self.question:
            yield Conflict(
                keys=("reward.question",), text=" has no {completion}, so it is the same for all completions"
            )


_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _check_function(path: str) -> str:
    """Raises an error for text that is not module:name, or that names a file instead of a module."""
    module, _, name = path.partition(":")
    if _FUNCTION.fullmatch(path) and not module.endswith(".py"):
        return path
    stem = PurePath(module).name.removesuffix(".py")
    guess = f"{stem}:{name or 'NAME'}"
    example = f"; here {guess}, with the folder of {stem}.py as the present one or in PYTHONPATH" if stem else ""
    raise PydanticCustomError("function_path", "{text}", {"text": f"package.module:name{example}"})


class FunctionReward(Section):
    """A custom function or class."""

    kind: Literal["function"]
    path: Annotated[str, AfterValidator(_check_function)] = Field(
        description="package.module:name of a function (completion, answer) that returns a number or a RewardResult, "
        "or of a class whose objects are called like that. They may also take parameters named prompt and row. A class "
        "with score_batch and close scores many completions in one call (docs/rewards.md).",
    )
    time_limit_s: float = Field(
        default=60.0,
        gt=0,
        description="A call, which scores one completion, that takes longer ends the run with a message that shows "
        "where it hangs. Calls of score_batch have no such limit.",
    )


class LengthReward(Section):
    """0 up to `free` characters or words, down to -1 at `limit`."""

    kind: Literal["length"]
    free: int = Field(ge=0, description="Length without a penalty.")
    limit: int = Field(ge=1, description="Length at which the reward is -1; more than free.")
    unit: Literal["characters", "words"] = Field(default="characters", description="Unit of lengths.")

    def conflicts(self) -> Iterator[Conflict]:
        if self.limit <= self.free:
            yield Conflict(
                keys=("reward.limit", "reward.free"),
                text=f"={self.limit} is not more than reward.free={self.free}; use at least {self.free + 1}",
            )


class LengthTargetReward(Section):
    """1 at `target` characters or words, falling to 0 at a distance of `tolerance`."""

    kind: Literal["length_target"]
    target: int = Field(ge=1, description="The desired length.")
    tolerance: int = Field(ge=1, description="Distance at which the reward reaches 0.")
    unit: Literal["characters", "words"] = Field(default="characters", description="Unit of lengths.")


TermReward = Annotated[
    RuleReward
    | ChoiceReward
    | MathRewardConfig
    | CodeRewardConfig
    | ModelReward
    | JudgeReward
    | FunctionReward
    | LengthReward
    | LengthTargetReward,
    Field(discriminator="kind"),
]


class RewardTermConfig(Section):
    """One term of a weighted sum."""

    weight: float = Field(description="Factor of the term's value; not 0.")
    reward: TermReward = Field(description="What scores this term.")


class WeightedRewardConfig(Section):
    """A weighted sum of rewards; the first term decides the outcome that is counted."""

    kind: Literal["weighted"]
    terms: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], RewardTermConfig] = Field(
        min_length=1, description="Name (for the metrics) -> weight and reward."
    )

    def conflicts(self) -> Iterator[Conflict]:
        for name, term in self.terms.items():
            if term.weight == 0:
                yield Conflict(keys=(f"reward.terms.{name}.weight",), text="=0 has no effect; leave the term out")
            if term.reward.kind == "random":
                yield Conflict(
                    keys=(f"reward.terms.{name}.reward.kind",),
                    text="=random is a control for a whole run; use it as reward.kind",
                )


class BySourceRewardConfig(Section):
    """A reward for each source of a mixture of data."""

    kind: Literal["by_source"]
    sources: dict[str, TermReward] = Field(min_length=1, description="Source -> its reward.")
    column: str = Field(
        default="data_source",
        description="Column of a row that names its source; rows of `task.mixture` have their name in data_source.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        for name, reward in self.sources.items():
            if reward.kind == "random":
                yield Conflict(
                    keys=(f"reward.sources.{name}.kind",),
                    text="=random is a control for a whole run; use it as reward.kind",
                )


RewardConfig = Annotated[TermReward | WeightedRewardConfig | BySourceRewardConfig, Field(discriminator="kind")]
"""Any reward's config."""


def members_of(reward: RewardConfig, key: str = "reward") -> dict[str, TermReward]:
    """Config key -> each reward that a weighted sum or a reward by source consists of; empty for others."""
    match reward:
        case WeightedRewardConfig():
            return {f"{key}.terms.{name}.reward": term.reward for name, term in reward.terms.items()}
        case BySourceRewardConfig():
            return {f"{key}.sources.{name}": member for name, member in reward.sources.items()}
    return {}


COMPARING = ("exact", "numeric", "multiple_choice", "math", "code")


def compares_with_answer(reward: RewardConfig) -> bool:
    """Returns whether a reward compares completions with a reference answer. What a custom function does is its own
    affair, so it does not need one."""
    if isinstance(reward, JudgeReward):
        return "{answer}" in reward.question
    return reward.kind in COMPARING or any(map(compares_with_answer, members_of(reward).values()))

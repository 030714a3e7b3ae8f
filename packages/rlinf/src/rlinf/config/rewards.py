"""Config of the reward: which rule, test or model scores a completion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rlinf.config.base import Conflict, InputPath, Section

MAX_JUDGE_FAILURES = (
    "Largest share of a step's completions on which the reward itself may fail (an exception of a built-in rule, a "
    "check whose process dies). These count as crashed, with a reward of 0; a step with more of them ends the run."
)


class RuleReward(Section):
    """A rule without options: 1 or 0."""

    kind: Literal["exact", "numeric", "format", "random"] = Field(
        description="exact: the text equals the answer. numeric: the last number does. format: <think> ... </think> "
        "<answer> ... </answer>, whatever is in them. random: a control, coin flips drawn from the run's seed, with "
        "which nothing can be learned; evaluation stays exact."
    )


class ChoiceReward(Section):
    """The last letter that is stated as the answer is the reference's."""

    kind: Literal["multiple_choice"]
    num_choices: int = Field(default=26, ge=2, le=26, description="Letters from A on that may be answered.")


class MathRewardConfig(Section):
    """The answer means the same as the reference, by math-verify in a pool of processes (`rlinf[math]`)."""

    kind: Literal["math"]
    num_processes: int = Field(default=2, ge=1, description="Checking processes; each keeps a CPU core busy.")
    time_limit_s: float = Field(default=1.0, ge=0.01, description="CPU seconds for one comparison.")
    wall_limit_s: float = Field(default=2.0, ge=0.01, description="Seconds by the clock for one comparison.")
    memory_limit_mib: int = Field(default=1024, ge=128, description="Memory of one checking process.")


class CodeRewardConfig(Section):
    """The last fenced program passes the tests in the reference, run in a sandbox."""

    kind: Literal["code"]
    num_processes: int = Field(default=2, ge=1, description="Programs that run at a time.")
    wall_limit_s: float = Field(default=10.0, ge=0.1, description="Seconds that one run may last.")
    cpu_limit_s: int = Field(default=5, ge=1, description="CPU seconds of one run, whole ones.")
    memory_limit_mib: int = Field(default=512, ge=64, description="Memory of one run.")
    partial: bool = Field(default=False, description="A share of the tests passed gives a share of the reward.")
    allow_weak_isolation: bool = Field(
        default=False,
        description="Accept the weak sandbox where the kernel offers no namespaces, even if programs can forge their "
        "verdict in it; the manifest says what is open.",
    )


class ModelReward(Section):
    """The score that a reward model of Hugging Face's sequence classification gives."""

    kind: Literal["model"]
    path: InputPath = Field(description="Its folder: config.json with one label, weights, tokenizer.")
    batch_size: int = Field(default=16, ge=1, description="Rows of one forward pass.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Of a longer row the end is kept; null for what the model can read."
    )


_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _check_function(path: str) -> str:
    """Refuses what names no function, and the path of a file in place of a module."""
    module, _, name = path.partition(":")
    if _FUNCTION.fullmatch(path) and not module.endswith(".py"):
        return path
    stem = PurePath(module).name.removesuffix(".py")
    guess = f"{stem}:{name or 'NAME'}"
    example = f"; here {guess}, with the folder of {stem}.py as the present one or in PYTHONPATH" if stem else ""
    raise PydanticCustomError("function_path", "{text}", {"text": f"package.module:name{example}"})


class FunctionReward(Section):
    """A function or class of one's own."""

    kind: Literal["function"]
    path: Annotated[str, AfterValidator(_check_function)] = Field(
        description="package.module:name, of a function (completion, answer) that returns a number or a RewardResult, "
        "or of a class whose objects are called like that. Parameters named prompt and row are given those.",
    )
    time_limit_s: float = Field(
        default=60.0, gt=0, description="A call that takes longer ends the run and shows where it hangs."
    )


class LengthReward(Section):
    """0 up to `free` characters or words, down to -1 at `limit`."""

    kind: Literal["length"]
    free: int = Field(ge=0, description="Length that costs nothing.")
    limit: int = Field(ge=1, description="Length at which the reward is -1; more than free.")
    unit: Literal["characters", "words"] = Field(default="characters", description="What is counted.")

    def conflicts(self) -> Iterator[Conflict]:
        if self.limit <= self.free:
            yield Conflict(
                keys=("reward.limit", "reward.free"),
                text=f"={self.limit} is not more than reward.free={self.free}; use at least {self.free + 1}",
            )


class LengthTargetReward(Section):
    """1 at `target` characters or words, less on both sides, 0 from `tolerance` away."""

    kind: Literal["length_target"]
    target: int = Field(ge=1, description="The length wanted.")
    tolerance: int = Field(ge=1, description="Distance at which nothing is left.")
    unit: Literal["characters", "words"] = Field(default="characters", description="What is counted.")


TermReward = Annotated[
    RuleReward
    | ChoiceReward
    | MathRewardConfig
    | CodeRewardConfig
    | ModelReward
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
    """A sum of weight times reward; the first term decides the outcome that is counted."""

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


RewardConfig = Annotated[TermReward | WeightedRewardConfig, Field(discriminator="kind")]
"""Any reward's config."""

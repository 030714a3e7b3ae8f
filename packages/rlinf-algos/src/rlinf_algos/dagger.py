"""DAgger (arXiv:1011.0686, algorithm 3.1) as plain data: the policy acts, an expert names what it would have done, and
the policy imitates all that was named so far.

Departs from the paper:
* **Updates continue** from the weights of the last training step; the paper trains a new policy in each iteration.
* **Shares are exact.** A fixed number of states is labelled in each training step, so it is known beforehand how many
  actions the expert names, and a budget of them needs no communication.

Needs no torch, like `Algorithm`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from rlinf_algos.algorithm import AlgorithmError


@dataclass(frozen=True, kw_only=True, slots=True)
class DaggerAlgorithm:
    """How an expert's answers become updates. An answer is the action, or the chunk of actions, that the expert names
    for one observation.

    Example: DaggerAlgorithm(query_rate=0.25) asks the expert at every fourth observation, at random.
    """

    __pydantic_config__: ClassVar = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }
    """As `Algorithm.__pydantic_config__`."""

    name: Literal["dagger"] = "dagger"
    """dagger: imitation of an expert in the states that the policy visits."""
    num_updates: int = 50
    """Optimizer steps of a training step, each on a batch from all that the expert has named so far."""
    batch_size: int = 64
    """Answers of an update, those of demonstrations included; a multiple of actor.num_shards."""
    buffer_size: int = 100_000
    """Answers that the actor keeps beside those of demonstrations, over all shards; the oldest are overwritten."""
    query_rate: float = 1.0
    """Share of the observations of a training step for which the expert is asked, drawn at random from those where the
    policy acts; at least one of each environment group."""
    max_expert_actions: int | None = None
    """Actions that the expert names in the whole run, without those of demonstrations: an answer of K actions counts K.
    After that nobody asks it, and updates go on. null: no limit."""
    expert_share: float = 0.0
    """Share of the environments in which the expert acts in the first training step; it is asked at each of its
    actions."""
    expert_decay: float = 0.5
    """The share of the expert in a training step is that of the step before, times this."""
    takes_over: bool = False
    """Where the expert acts, it takes over from the policy in the middle of the segment (HG-DAgger), at times that are
    evenly spread over the environments. false: it acts from the beginning of the segment."""
    max_staleness: int = 0
    """Training steps by which the weights that act may be older than those that train, so that simulation runs ahead of
    training. 0: the steps do not overlap."""

    def __post_init__(self) -> None:
        errors = list(_problems(asdict(self)))
        if errors:
            raise AlgorithmError(errors)

    def takeovers(self, step: int, num_envs: int, num_answers: int) -> list[int]:
        """For each environment of a group in which the expert acts in a training step, its first answer there.

        Args:
            num_answers: answers of the policy in a segment of one environment.
        """
        count = round(self.expert_share * self.expert_decay**step * num_envs)
        return [(2 * index + 1) * num_answers // (2 * count) if self.takes_over else 0 for index in range(count)]

    def num_asked(self, step: int, num_envs: int, num_answers: int) -> int:
        """Observations of a group for which the expert is asked in a training step, without a budget; at least one."""
        num_driven = sum(num_answers - first for first in self.takeovers(step, num_envs, num_answers))
        others = num_envs * num_answers - num_driven
        return num_driven + min(others, max(0 if num_driven else 1, round(self.query_rate * others)))


_RANGES: dict[str, tuple[float, float, str]] = {
    "num_updates": (1, math.inf, "a training step changes the policy"),
    "batch_size": (1, math.inf, "an update needs an answer"),
    "buffer_size": (1, math.inf, "it counts answers"),
    "query_rate": (0.0, 1.0, "it is a share"),
    "expert_share": (0.0, 1.0, "it is a share"),
    "expert_decay": (0.0, 1.0, "the share of the expert falls, or stays"),
    "max_staleness": (0, 8, "as for other algorithms"),
}


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with the fields, as (field, what follows its name in a message)."""
    for name, (low, high, why) in _RANGES.items():
        if not low <= values[name] <= high:
            allowed = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            yield name, f"={values[name]} must be {allowed}: {why}"
    budget = values["max_expert_actions"]
    if budget is not None and budget < 1:
        yield "max_expert_actions", f"={budget} must be at least 1: it counts actions; null sets no limit"

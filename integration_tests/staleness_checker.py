"""Checks the promises about staleness in the folder of a finished run: `python staleness_checker.py RUN`.

The run needs `run.record: true`. The checker reads files and shares no code with what it checks: the age of a token
follows from its version, from the number of optimizer steps in a training step, and from how many steps had been
trained when the step that sampled it began.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from command_line import rows
from rlinf_comm import unpack
from rlinf_workers.roles import LateGroup

Prompt = tuple[int, int]
"""Step and index with which it was submitted."""


@dataclass(frozen=True, kw_only=True)
class TrainedGroup:
    """A group of completions in the record of the step that has trained on it."""

    index: int
    digest: str
    prompt: Prompt
    tokens: dict[int, int]
    """Policy version -> number of tokens that it sampled."""
    rank: int = 0
    """Rank of the rollout."""


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """A row of the record."""

    step: int
    begun_after: int
    groups: list[TrainedGroup]
    scored: list[tuple[int, str]]
    """Index and digest of each group that the reward has scored."""
    shares: dict[int, float]
    """Age -> share of the tokens, as the actor counted them; empty if max_staleness is 0."""
    takes: list[tuple[int, int]] = field(default_factory=list)
    """Ranks of the rollout and the versions that they took while they generated, in order."""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What a run's folder says."""

    max_staleness: int
    num_prompts: int
    num_steps: int
    updates: int
    """Optimizer steps in a training step."""
    as_finished: bool
    steps: list[TrainedStep]
    late: list[Prompt]
    """Those in the last checkpoint, which no step has trained on."""
    last_version: int
    """Of the weights in the last checkpoint."""

    @property
    def max_lateness(self) -> int:
        """Steps by which a group may leave later than its prompt came in."""
        return self.max_staleness - 1 if self.as_finished else 0

    @property
    def first_version(self) -> int:
        return self.last_version - self.updates * self.num_steps

    def num_trained(self, version: int) -> float:
        """Training steps after which the weights had this version; a fraction if it is none of the versions between
        two steps."""
        return (version - self.first_version) / self.updates

    def admitted(self) -> set[Prompt]:
        """All prompts that were submitted: those of each step, and the late groups with which the run began."""
        late = range(self.num_prompts, self.num_prompts + self.num_prompts * self.max_lateness // 2)
        every = {(step, index) for step in range(self.num_steps) for index in range(self.num_prompts)}
        return every | {(0, index) for index in late}


@dataclass(kw_only=True)
class Verdict:
    """What the checker has counted, and what is wrong."""

    tokens_by_age: Counter[int] = field(default_factory=Counter)
    groups_by_lateness: Counter[int] = field(default_factory=Counter)
    num_takes: int = 0
    """Versions that were taken while completions ran."""
    num_mixed_groups: int = 0
    """Groups with tokens of several versions."""
    mistakes: list[str]


def check(folder: Path) -> Verdict:
    """Reads a finished run and checks it."""
    return verdict(read_run(folder))


def verdict(run: FinishedRun) -> Verdict:
    checks = (admission, takes, tokens, batches, each_prompt_once, lateness, scores, shares)
    result = Verdict(mistakes=[mistake for one in checks for mistake in one(run)])
    for step in run.steps:
        result.num_takes += len(step.takes)
        for group in step.groups:
            result.groups_by_lateness[step.step - group.prompt[0]] += 1
            result.num_mixed_groups += len(group.tokens) > 1
        result.tokens_by_age += ages(run, step)
    return result


# -- promises ----------------------------------------------------------------------------------------------------------


def admission(run: FinishedRun) -> Iterator[str]:
    """Every step is there once, and none began before it was its turn."""
    if [one.step for one in run.steps] != list(range(run.num_steps)):
        yield f"the record has steps {[one.step for one in run.steps]} of {run.num_steps}"
    ahead = 1 if run.as_finished else run.max_staleness
    previous = 0
    for one in run.steps:
        if not max(previous, one.step - ahead) <= one.begun_after <= one.step:
            yield f"step {one.step} began after {one.begun_after} steps"
        previous = one.begun_after


def takes(run: FinishedRun) -> Iterator[str]:
    """Weights that were taken while completions ran are newer than those before, and were there."""
    served = served_by_rank(run)
    for one in run.steps:
        for rank in {rank for rank, _ in one.takes}:
            versions = served[rank, one.step]
            if versions != sorted(set(versions)) or versions[-1] > one.step:
                yield f"step {one.step}: rank {rank} took weights of {versions[1:]} steps after those of {versions[0]}"


def served_by_rank(run: FinishedRun) -> dict[tuple[int, int], list[float]]:
    """Rank of the rollout and step -> training steps behind the weights that it served, in order."""
    ranks = {group.rank for one in run.steps for group in one.groups} | {
        rank for one in run.steps for rank, _ in one.takes
    }
    served: dict[tuple[int, int], list[float]] = {}
    for rank in ranks:
        newest = 0.0
        for one in run.steps:
            taken = [run.num_trained(version) for taker, version in one.takes if taker == rank]
            served[rank, one.step] = [max(newest, one.begun_after), *taken]
            newest = served[rank, one.step][-1]
    return served


def tokens(run: FinishedRun) -> Iterator[str]:
    """No token is older than max_staleness, and each is of a version that was served while its group was under way."""
    served_in = served_by_rank(run)
    for one in run.steps:
        for group in one.groups:
            steps = range(group.prompt[0], one.step + 1)
            served = {version for step in steps for version in served_in.get((group.rank, step), ())}
            for version in group.tokens:
                trained = run.num_trained(version)
                if not 0 <= one.step - trained <= run.max_staleness:
                    yield f"step {one.step}, group {group.index}: tokens that are {one.step - trained:g} steps old"
                if trained not in served:
                    yield f"step {one.step}, group {group.index}: tokens of version {version}, which was not served"


def batches(run: FinishedRun) -> Iterator[str]:
    """Every batch is full, and its groups have tokens."""
    for one in run.steps:
        indices = sorted(group.index for group in one.groups)
        if indices != list(range(run.num_prompts)):
            yield f"step {one.step} has groups {indices} of {run.num_prompts}"
        yield from (f"step {one.step}, group {group.index}: no tokens" for group in one.groups if not group.tokens)


def each_prompt_once(run: FinishedRun) -> Iterator[str]:
    """Each prompt that was admitted is trained on once, or still under way."""
    times = Counter([group.prompt for one in run.steps for group in one.groups] + run.late)
    yield from (f"the group of prompt {prompt} is there {n} times" for prompt, n in sorted(times.items()) if n > 1)
    yield from (f"the group of prompt {prompt} is lost" for prompt in sorted(run.admitted() - times.keys()))
    yield from (f"nobody has admitted prompt {prompt}" for prompt in sorted(times.keys() - run.admitted()))


def lateness(run: FinishedRun) -> Iterator[str]:
    """No group leaves too late, and none that is under way at the end would have had to leave."""
    left = [(group.prompt, one.step) for one in run.steps for group in one.groups]
    for prompt, step in left + [(prompt, run.num_steps) for prompt in run.late]:
        if not 0 <= step - prompt[0] <= run.max_lateness:
            yield f"the group of prompt {prompt} is under way in step {step}, which is too late"


def scores(run: FinishedRun) -> Iterator[str]:
    """What was scored is what was sampled."""
    for one in run.steps:
        if sorted(one.scored) != sorted((group.index, group.digest) for group in one.groups):
            yield f"step {one.step}: the reward has scored other groups than the rollout has sampled"


def shares(run: FinishedRun) -> Iterator[str]:
    """What the actor has trained on is what was sampled: both have as many tokens of each age."""
    for one in run.steps if run.max_staleness else []:
        counted = ages(run, one)
        total = max(counted.total(), 1)
        if any(abs(counted[age] / total - one.shares.get(age, 0.0)) > 1e-5 for age in range(run.max_staleness + 1)):
            yield f"step {one.step}: the actor has counted {one.shares}, and the record has {dict(counted)}"


def ages(run: FinishedRun, step: TrainedStep) -> Counter[int]:
    """Age -> number of tokens in a step."""
    counts: Counter[int] = Counter()
    for group in step.groups:
        for version, count in group.tokens.items():
            counts[int(step.step - run.num_trained(version))] += count
    return counts


# -- files -------------------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> FinishedRun:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    checkpoint, algorithm = _last_checkpoint(folder), config["algorithm"]
    late = checkpoint / "late_groups.bin"
    shares_of = {row["step"]: _shares(row) for row in rows(folder)}
    record = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return FinishedRun(
        max_staleness=algorithm["max_staleness"],
        num_prompts=config["rollout"]["num_prompts"],
        num_steps=int(checkpoint.name.removeprefix("step-")),
        updates=algorithm["num_minibatches"] * algorithm["num_epochs"],
        as_finished=config["rollout"]["sampler"] == "as_finished",
        steps=[_step(row, shares_of.get(row["step"], {})) for row in record],
        late=_late(late) if late.exists() else [],
        last_version=json.loads((checkpoint / "actor.json").read_text())["policy_version"],
    )


def _last_checkpoint(folder: Path) -> Path:
    return max(folder.glob("checkpoints/step-??????"))


def _late(file: Path) -> list[Prompt]:
    shares_of_ranks: list[list[LateGroup]] = unpack(file.read_bytes())
    return [(one.step, one.submitted_index) for share in shares_of_ranks for one in share]


def _step(row: dict[str, Any], shares: dict[int, float]) -> TrainedStep:
    decisions = row["decisions"]
    return TrainedStep(
        step=row["step"],
        begun_after=row["begun_after"],
        groups=[_group(one, rank) for rank, one in decisions["rollout"] if "group" in one],
        takes=[(rank, one["took"]) for rank, one in decisions["rollout"] if "took" in one],
        scored=[(one["group"], one["samples"]) for _, one in decisions["reward"]],
        shares=shares,
    )


def _group(decision: dict[str, Any], rank: int) -> TrainedGroup:
    step, index = decision["submitted"]
    return TrainedGroup(
        index=decision["group"],
        digest=decision["samples"],
        prompt=(step, index),
        tokens={int(version): count for version, count in decision["tokens"].items()},
        rank=rank,
    )


def _shares(row: dict[str, Any]) -> dict[int, float]:
    head, tail = "rollout/staleness_", "_fraction"
    names = {key: key.removeprefix(head).removesuffix(tail) for key in row if key.startswith(head)}
    return {int(name): row[key] for key, name in names.items() if name.isdecimal()}


if __name__ == "__main__":
    outcome = check(Path(sys.argv[1]))
    print(f"tokens by age {dict(outcome.tokens_by_age)}, groups by lateness {dict(outcome.groups_by_lateness)}")
    sys.exit("\n".join(outcome.mistakes) or 0)

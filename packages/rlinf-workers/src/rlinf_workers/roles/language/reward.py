"""Reward: reads completions as text and scores them. A host-only worker.

An episode of several turns keeps the reward that its harness returned. Without one the rule scores its last turn. A
discarded episode has no reward; one on which the rule itself fails is discarded, with the cause `service`.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, get_args

import numpy as np
import torch
from msgspec import convert, to_builtins
from torch import Tensor

from rlinf_algos import RewardError
from rlinf_algos.rewards import (
    OUTCOMES,
    PICTURE_FILES,
    RewardResult,
    RewardSpec,
    RewardTerm,
    awaited_processes,
    close_reward,
    make_reward,
    score_all,
)
from rlinf_comm import record
from rlinf_workers.agents.records import NOT_OF_POLICY, Cause
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.language_model import load_tokenizer, silent_token_ids
from rlinf_workers.roles.language.agent_parts import parts_by_agent
from rlinf_workers.roles.language.conversation import conversation
from rlinf_workers.roles.records.language import Prompt, SampleGroup, ScoredGroup
from rlinf_workers.worker import ShownRow, Worker

COIN_DOMAIN = 0x5EED_C015
"""Separates the coin flips from the noise that the rollout draws for the same seed, step and prompt."""


record(RewardSpec)
record(RewardTerm)


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSettings:
    """Which rule scores."""

    rule: str | RewardSpec
    """The argument of `rlinf_algos.rewards.make_reward`: a name, `package.module:function`, or a spec with options."""
    tokenizer_folder: str
    random_in_training: bool = False
    """A control experiment: training rewards are coin flips, so training must not help. Evaluation keeps the rule."""
    judges: bool = True
    """Whether outcomes are verdicts on answers, and are counted; False: the reward only gives scores."""
    seed: int = 0
    num_shown: int = 0
    """Number of groups of a step whose completions are shown in the run's samples file."""
    tokenizers_of_agents: dict[str, str] = field(default_factory=dict)
    """Agent -> folder of its tokenizer, of those with another model."""
    max_judge_failures: float = 0.5
    """Largest share of a step's completions on which the reward itself may fail."""
    further_policies: tuple[str, ...] = ()
    """Worker groups that train further policies, in the order of the channels of `Reward.score`."""
    cut_reward: float | None = None
    """Reward of an episode that was cut off (turns, tokens, time) before its harness returned one; None: the rule
    scores its last turn."""


class Failures:
    """Counts the completions of a step on which the reward itself failed."""

    def __init__(self) -> None:
        self._num_failed, self._num_scored = 0, 0
        self._first: str | None = None

    def count(self, results: Sequence[RewardResult]) -> int:
        """Counts these results; returns how many of them failed."""
        failed = [result for result in results if result.judge_failed]
        if failed and self._first is None:
            self._first = failed[0].detail
        self._num_failed += len(failed)
        self._num_scored += len(results)
        return len(failed)

    def check(self, max_share: float) -> None:
        """Raises: RewardError if the reward itself failed on more than `max_share` of the completions."""
        if self._num_failed > max_share * self._num_scored:
            raise RewardError(
                f"the reward itself failed on {self._num_failed} of the {self._num_scored} completions that this "
                f"worker scored in the step; max_judge_failures={max_share:g} allows fewer. The first failure: "
                f"{self._first}. The worker's log has the tracebacks; docs/rewards.md says what counts as a failure"
            )


class Reward(Worker):
    """Scores each completion by a rule; all completions of a chunk in one call."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._tokenizer = load_tokenizer(settings.tokenizer_folder)
        self._silent_ids = silent_token_ids(settings.tokenizer_folder, self._tokenizer)
        of_agents = {agent: load_tokenizer(path) for agent, path in settings.tokenizers_of_agents.items()}
        self._tokenizers = {"": self._tokenizer, **of_agents}
        self._reward = make_reward(settings.rule)
        self._failures = Failures()

    def score(self, samples: Reader[SampleGroup], scored: Writer[ScoredGroup], *further: Writer[ScoredGroup]) -> None:
        """Stage: adds rewards to groups.

        Args:
            further: one for each of `further_policies`, which gets the same episodes as that policy learns from them;
                or none, in an evaluation.

        Raises: RewardError, also if the reward itself fails on too many completions.
        """
        for chunk in samples:
            groups = self.score_groups(chunk)
            for trainer, writer in zip(self._settings.further_policies, further, strict=bool(further)):
                writer.put_many([(group.samples.index, self.of_policy(group, trainer)) for group in groups])
            scored.put_many([(group.samples.index, _of_own_policy(group)) for group in groups])
        self.check_failures()

    def score_groups(self, groups: Sequence[SampleGroup]) -> list[ScoredGroup]:
        """The groups with a reward for each completion; records the rewards. Raises: RewardError."""
        scored = self._score(groups)
        for group in scored:
            self._record_causes(group)
            rewards = group.counted_rewards
            if len(rewards):
                mean = float(rewards.mean())
                self.record("reward/mean", mean)
                self.record_spread("reward/std_between_groups", mean)
            if len(rewards) > 1:
                self.record("reward/std_within_group", float(rewards.std()))
            for one in (group, *(self.of_policy(group, trainer) for trainer in group.samples.of_policies)):
                for part in parts_by_agent(one) if one.samples.agents else ():
                    if len(own := part.group.counted_rewards):
                        self.record(f"reward/agent/{part.agent}", float(own.mean()))
            if group.samples.index < self._settings.num_shown:
                self._show(group)
        return scored

    def of_policy(self, group: ScoredGroup, trainer: str) -> ScoredGroup:
        """The group as a further policy learns from it, with the rewards of its own agents."""
        samples, rewards = group.samples.of_policies[trainer], group.rewards
        samples = replace(samples, prompt=replace(samples.prompt, index=group.samples.index))
        is_lost = group.samples.is_discarded & ~samples.is_discarded
        if lost := is_lost.nonzero()[:, 0].tolist():
            samples = _discarded(samples, {episode: group.samples.details[episode] for episode in lost})
        own = samples.agent_rewards
        assert own is not None, "agents have policies by their names"
        if self._flips_coins:
            own = torch.full_like(own, nan)
        by_agent = _agent_rewards(samples, own, rewards)
        return ScoredGroup(samples=samples, rewards=rewards, agent_rewards=by_agent, completions=())

    def check_failures(self) -> None:
        """Ends a step. Raises: RewardError if the reward itself failed on too many of its completions."""
        failures, self._failures = self._failures, Failures()
        failures.check(self._settings.max_judge_failures)

    def abandon(self) -> None:
        self._failures = Failures()

    def close(self) -> None:
        """Closes the reward's resources, such as a pool of processes."""
        close_reward(self._reward)

    @property
    def _flips_coins(self) -> bool:
        return self._settings.random_in_training and self.step.phase == "train"

    def _score(self, groups: Sequence[SampleGroup]) -> list[ScoredGroup]:
        if self._settings.cut_reward is not None:
            groups = [_with_cut_rewards(group, self._settings.cut_reward) for group in groups]
        texts = [self._completions(group) for group in groups]
        if self._flips_coins:
            coins = [self._coins(group, len(own)) for group, own in zip(groups, texts, strict=True)]
            coins = [one.masked_fill(group.is_discarded, nan) for one, group in zip(coins, groups, strict=True)]
            return [
                ScoredGroup(
                    samples=group,
                    rewards=rewards,
                    agent_rewards=rewards[:, None].repeat(1, len(group.agents)) if group.agents else None,
                    completions=own,
                )
                for group, own, rewards in zip(groups, texts, coins, strict=True)
            ]
        places = [_scored_by_rule(group, len(own)) for group, own in zip(groups, texts, strict=True)]
        chosen = [tuple(own[place] for place in of_group) for own, of_group in zip(texts, places, strict=True)]
        results = self._recorded_or_new(groups, chosen)
        return [
            _scored_group(group, own, dict(zip(of_group, graded, strict=True)))
            for group, own, of_group, graded in zip(groups, texts, places, results, strict=True)
        ]

    def _recorded_or_new(
        self, groups: Sequence[SampleGroup], texts: list[tuple[str, ...]]
    ) -> list[tuple[RewardResult, ...]]:
        """The results of each group: those that were recorded for the same samples, or new ones, which are recorded."""
        if not self.records:
            return self._results(groups, texts)
        digests = [group.digest() for group in groups]
        earlier = {one["samples"]: one["results"] for _, one in self.recorded or ()}
        if all(digest in earlier for digest in digests):
            results = [convert(earlier[digest], tuple[RewardResult, ...]) for digest in digests]
            self._record([result for own in results for result in own])
        else:
            results = self._results(groups, texts)
        for group, digest, own in zip(groups, digests, results, strict=True):
            self.decide({"group": group.index, "samples": digest, "results": to_builtins(own)})
        return results

    def _prompt(self, group: SampleGroup) -> str:
        """The text of the prompt, for rewards that read it."""
        prompt = group.prompt
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=True)

    def _completions(self, group: SampleGroup) -> tuple[str, ...]:
        """[G], the texts of the completions, or of the last turns of episodes, with those special tokens that the
        reward reads as tags and no others."""
        if group.turns is None:
            lengths = group.row_lengths.tolist()
            rows = [row[:length] for row, length in zip(group.completion_ids.tolist(), lengths, strict=True)]
        else:
            rows = [_last_turn(group, episode) for episode in range(group.num_episodes)]
        return self._texts(rows)

    def _texts(self, rows: Sequence[Sequence[int]]) -> tuple[str, ...]:
        ids = [[token for token in row if token not in self._silent_ids] for row in rows]
        return tuple(self._tokenizer.batch_decode(ids, skip_special_tokens=False))

    def _results(self, groups: Sequence[SampleGroup], texts: list[tuple[str, ...]]) -> list[tuple[RewardResult, ...]]:
        """The results of each group. All groups are scored in one call, unless rounding depends on the batch: the
        granularity of the plan must not change numbers."""
        pairs = [(group, own) for group, own in zip(groups, texts, strict=True) if own]
        if not pairs:
            return [()] * len(groups)
        calls = [[pair] for pair in pairs] if getattr(self._reward, "depends_on_batch", False) else [pairs]
        results = [result for call in calls for result in self._call(call)]
        self._record(results)
        rest = iter(results)
        return [tuple(itertools.islice(rest, len(own))) for own in texts]

    def _call(self, pairs: Sequence[tuple[SampleGroup, tuple[str, ...]]]) -> tuple[RewardResult, ...]:
        completions = [group.prompt.opening + text for group, own in pairs for text in own]
        references = [group.prompt.reference_answer for group, own in pairs for _ in own]
        prompts = [prompt for group, own in pairs for prompt in [self._prompt(group)] * len(own)]
        rows = None
        if getattr(self._reward, "reads_rows", False):
            rows = [row for group, own in pairs for row in [_row(group.prompt)] * len(own)]
        with self._host.waits.waiting("checker", processes=awaited_processes):
            return score_all(self._reward, completions, references, prompts, rows)

    def _record(self, results: Sequence[RewardResult]) -> None:
        """Records the share of each outcome (if answers are judged), the share of failures of the reward itself, and
        the mean of each component of a weighted reward."""
        if not results:
            return
        counts = Counter(result.outcome for result in results)
        for outcome in OUTCOMES if self._settings.judges else ():
            self.record(f"reward/{outcome}", 1.0, weight=counts[outcome])
            self.record(f"reward/{outcome}", 0.0, weight=len(results) - counts[outcome])
        num_failed = self._failures.count(results)
        self.record("reward/judge_failures", 1.0, weight=num_failed)
        self.record("reward/judge_failures", 0.0, weight=len(results) - num_failed)
        for part in (part for result in results for part in result.parts):
            self.record(f"reward/part/{part.name}", part.result.value)

    def _coins(self, group: SampleGroup, count: int) -> torch.Tensor:
        key = [self._settings.seed ^ COIN_DOMAIN, (self.step.step << 32) | group.index]
        coins = np.random.Generator(np.random.Philox(key=key)).integers(0, 2, count)
        return torch.from_numpy(coins).float()

    def _record_causes(self, group: ScoredGroup) -> None:
        """Records the share of the episodes that ended by each cause."""
        causes = group.samples.causes
        for cause in CAUSES if causes else ():
            for is_such, weight in ((1.0, causes.count(cause)), (0.0, len(causes) - causes.count(cause))):
                if cause in NOT_OF_POLICY:
                    self.record(f"agent/discarded/{cause}", is_such, weight=weight)
                else:
                    self.record(f"agent/ended/{cause}", is_such, weight=weight)

    def _show(self, group: ScoredGroup) -> None:
        """Shows all completions of a group, a row for each."""
        samples = group.samples
        prompt = self._tokenizer.decode(samples.prompt.token_ids, skip_special_tokens=True)
        lengths = samples.by_episode(samples.loss_mask.sum(-1)).int().tolist()
        for i, completion in enumerate(group.completions):
            row: ShownRow = {
                "prompt_index": samples.index,
                "sample": i,
                "prompt": prompt,
                "completion": completion,
                "reference_answer": samples.prompt.reference_answer,
                "reward": float(group.rewards[i]),
                "num_completion_tokens": lengths[i],
            }
            if group.rewards[i].isnan():
                del row["reward"]
            if group.answers and (answer := group.answers[i]) is not None:
                row["answer"] = answer
            if group.outcomes and group.outcomes[i]:
                row["outcome"] = group.outcomes[i]
            if samples.truncated is not None:
                row["truncated"] = bool(samples.truncated[_rows_of(samples, i)[-1]])
            if samples.lengths is not None:
                row |= self._shown_episode(group, i)
            elif samples.segments and len(samples.segments[i]) > 1:
                row["segments"] = ", ".join(
                    f"{one.num_tokens} of version {one.policy_version}" for one in samples.segments[i]
                )
            self.show(row)

    def _shown_episode(self, group: ScoredGroup, episode: int) -> ShownRow:
        """What a row has of an episode: `segments`, a JSON list of the texts of its last branch, each with its author,
        agent and policy version; `branches`, a list of such lists for other branches and other agents, from where they
        leave an earlier one; `agent_rewards`, a JSON object; `cause` and `detail`."""
        samples = group.samples
        *others, last = _rows_of(samples, episode)
        row: ShownRow = {"segments": json.dumps(conversation(samples, last, self._tokenizers), ensure_ascii=False)}
        if others:
            begins = samples.shared if samples.shared is not None else torch.zeros(len(samples.loss_mask))
            branches = [conversation(samples, other, self._tokenizers, int(begins[other])) for other in others]
            row["branches"] = json.dumps(branches, ensure_ascii=False)
        if group.agent_rewards is not None and not samples.is_discarded[episode]:
            own = group.agent_rewards[episode].tolist()
            row["agent_rewards"] = json.dumps(dict(zip(samples.agents, own, strict=True)), ensure_ascii=False)
        if samples.causes and samples.causes[episode]:
            row["cause"] = samples.causes[episode]
            if samples.details and samples.details[episode]:
                row["detail"] = samples.details[episode]
        return row


CAUSES: tuple[Cause, ...] = tuple(cause for cause in get_args(Cause) if cause)


def _of_own_policy(group: ScoredGroup) -> ScoredGroup:
    """The group without what further policies learn from."""
    return replace(group, samples=replace(group.samples, of_policies={})) if group.samples.of_policies else group


def _rows_of(samples: SampleGroup, episode: int) -> list[int]:
    if samples.trajectories is None:
        return [episode]
    return (samples.trajectories == episode).nonzero()[:, 0].tolist()


def _last_turn(samples: SampleGroup, episode: int) -> list[int]:
    """The tokens of the last turn of an episode; none if it has no turn or is discarded."""
    assert samples.turns is not None, "a group of episodes has turns"
    rows = _rows_of(samples, episode)
    turns = samples.turns[rows]
    return samples.completion_ids[rows][(turns == turns.max()) & (turns >= 0)].tolist()


def _with_cut_rewards(samples: SampleGroup, reward: float) -> SampleGroup:
    """The group with this reward for episodes that were cut off without one."""
    if samples.rewards is None:
        return samples
    is_cut = samples.rewards.isnan() & ~samples.is_discarded & torch.tensor([bool(cause) for cause in samples.causes])
    return replace(samples, rewards=samples.rewards.masked_fill(is_cut, reward))


def _scored_by_rule(samples: SampleGroup, num_texts: int) -> list[int]:
    """The completions or episodes that the rule scores."""
    if samples.rewards is None:
        return list(range(num_texts))
    return (samples.rewards.isnan() & ~samples.is_discarded).nonzero()[:, 0].tolist()


def _scored_group(samples: SampleGroup, texts: tuple[str, ...], results: dict[int, RewardResult]) -> ScoredGroup:
    """The group with its rewards.

    Args:
        results: episode -> the rule's result; of the others the harness has given the reward.
    """
    if samples.rewards is None:
        rewards = torch.tensor([float(results[place].value) for place in range(len(texts))])
    else:
        rewards = samples.rewards.clone()
        for place, result in results.items():
            rewards[place] = float(result.value)
        failed = {
            place: f"the reward failed: {result.detail or ''}"
            for place, result in results.items()
            if result.judge_failed
        }
        if failed:
            samples = _discarded(samples, failed)
            rewards[list(failed)] = nan
    own = samples.agent_rewards
    every = [results.get(place) for place in range(len(texts))]
    lost = samples.is_discarded.nonzero()[:, 0].tolist() if samples.causes else []
    counted = [one for place, one in enumerate(every) if place not in lost]
    return ScoredGroup(
        samples=samples,
        rewards=rewards,
        agent_rewards=None if own is None else _agent_rewards(samples, own, rewards),
        completions=texts,
        outcomes=tuple("" if one is None else one.outcome for one in every) if results else (),
        answers=tuple(None if one is None else one.answer for one in every) if results else (),
        **(_parts(every) if None not in counted else {}),
    )


def _agent_rewards(samples: SampleGroup, own: Tensor, rewards: Tensor) -> Tensor:
    """[G, K], the rewards of agents: their own, or else those of the episodes, [G]; NaN for discarded ones."""
    return own.where(~own.isnan(), rewards[:, None]).masked_fill(samples.is_discarded[:, None], nan)


def _discarded(samples: SampleGroup, details: dict[int, str]) -> SampleGroup:
    """The group without a loss on these episodes, on which the reward has failed."""
    assert samples.trajectories is not None, "a group of episodes has their rows"
    causes, messages = list(samples.causes), list(samples.details)
    for episode, detail in details.items():
        causes[episode], messages[episode] = "service", detail
    is_lost = torch.isin(samples.trajectories, torch.tensor(list(details)))[:, None]
    return replace(
        samples,
        loss_mask=samples.loss_mask.masked_fill(is_lost, 0.0),
        rollout_logprobs=samples.rollout_logprobs.masked_fill(is_lost, 0.0),
        turns=None if samples.turns is None else samples.turns.masked_fill(is_lost, -1),
        causes=tuple(causes),
        details=tuple(messages),
    )


def _row(prompt: Prompt) -> dict[str, Any]:
    """The data row of a prompt, with the files of its pictures."""
    row = json.loads(prompt.row_json or "{}")
    files = tuple(one.numpy().tobytes() for one in prompt.picture_files)
    return row | {PICTURE_FILES: files} if files else row


def _parts(results: Sequence[RewardResult | None]) -> dict[str, torch.Tensor]:
    """The fields of a `ScoredGroup` about the components of a weighted reward; NaN for an episode without a result."""
    first = next((result for result in results if result is not None), None)
    if first is None or not all(result.parts for result in results if result is not None):
        return {}
    nothing = [nan] * len(first.parts)
    return {
        "parts": torch.tensor(
            [nothing if result is None else [part.result.value for part in result.parts] for result in results]
        ),
        "part_weights": torch.tensor([part.weight for part in first.parts]),
    }

"""Reward: reads completions as text and scores them. A host-only worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlinf_algos.rewards import score_all
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.language_model import load_tokenizer
from rlinf_workers.records import SampleGroup, ScoredGroup
from rlinf_workers.worker import Worker

COIN_DOMAIN = 0x5EED_C015
"""Keeps the coins apart from the noise that the rollout draws for the same seed, step and prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSettings:
    """Which rule scores."""

    rule: str
    """A name known to rlinf_algos.rewards, or `package.module:function`."""
    tokenizer_folder: str
    random_in_training: bool = False
    """A control: training rewards are coin flips that know nothing, so that training must not help. Evaluation keeps
    the rule."""
    seed: int = 0
    num_shown: int = 0
    """Groups whose first completion is shown to people."""


class Reward(Worker):
    """Scores each completion of a group by a rule."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._tokenizer = load_tokenizer(settings.tokenizer_folder)

    def score(self, samples: Reader[SampleGroup], scored: Writer[ScoredGroup]) -> None:
        """Stage: groups in, groups with rewards out."""
        for chunk in samples:
            groups = [self._score(group) for group in chunk]
            for group in groups:
                self.record("reward/mean", float(group.rewards.mean()))
                if group.samples.index < self._settings.num_shown:
                    self._show(group)
            scored.put_many([(group.samples.index, group) for group in groups])

    def _score(self, group: SampleGroup) -> ScoredGroup:
        lengths = group.loss_mask.sum(-1).long().tolist()
        ids = [row[:length] for row, length in zip(group.completion_ids.tolist(), lengths, strict=True)]
        texts = tuple(self._tokenizer.batch_decode(ids, skip_special_tokens=True))
        if self._settings.random_in_training and self.step.phase == "train":
            return ScoredGroup(samples=group, rewards=self._coins(group, len(texts)), completions=texts)
        results = score_all(self._settings.rule, texts, [group.reference_answer] * len(texts))
        for result in results:
            self.record("reward/unparseable", float(result.outcome == "unparseable"))
        return ScoredGroup(
            samples=group,
            rewards=torch.tensor([result.value for result in results], dtype=torch.float32),
            completions=texts,
            outcomes=tuple(result.outcome for result in results),
            answers=tuple(result.answer for result in results),
        )

    def _show(self, group: ScoredGroup) -> None:
        self.show(
            {
                "prompt": self._tokenizer.decode(group.samples.prompt_ids, skip_special_tokens=True),
                "completion": group.completions[0],
                "reference_answer": group.samples.reference_answer,
                "reward": float(group.rewards[0]),
            }
        )

    def _coins(self, group: SampleGroup, count: int) -> torch.Tensor:
        key = [self._settings.seed ^ COIN_DOMAIN, (self.step.step << 32) | group.index]
        coins = np.random.Generator(np.random.Philox(key=key)).integers(0, 2, count)
        return torch.from_numpy(coins).float()

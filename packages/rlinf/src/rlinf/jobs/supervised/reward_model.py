"""The job `reward_model`: a model learns to score answers, from pairs of which one is preferred.

The model of a checkpoint is a folder that `reward.kind: model` of a recipe reads. A text is scored there as it was
trained on: a chat through the tokenizer's template, else prompt and answer one after the other without an end token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rlinf.config.supervised import RewardModelConfig
from rlinf.jobs.supervised.flow import REWARD_MODEL_TRAINER
from rlinf.jobs.supervised.pairs import PairJob, PreferenceSource
from rlinf.tasks.preferences import TokenizedPreference
from rlinf_workers.roles import Preference

END = torch.zeros(1, dtype=torch.int32)
"""Stands for the end of a text, where its score is; any token would do (rlinf_workers/models/scorer.py)."""


class ScoredTexts(PreferenceSource):
    """Pairs whose answers have one more token, which stands for their end."""

    def __init__(self, config: RewardModelConfig) -> None:
        super().__init__(config, scores_whole=True)

    def item(self, index: int, one: TokenizedPreference, place: int, *, is_held_out: bool) -> Preference:
        chosen, rejected = torch.cat([one.chosen_ids, END]), torch.cat([one.rejected_ids, END])
        return self.pair(index, replace(one, chosen_ids=chosen, rejected_ids=rejected))


class RewardModelJob(PairJob):
    """Minimizes the loss of Bradley and Terry."""

    config: RewardModelConfig
    source_class = ScoredTexts
    trainer_class = REWARD_MODEL_TRAINER

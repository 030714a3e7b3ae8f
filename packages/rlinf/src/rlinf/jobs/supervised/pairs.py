"""What the jobs that learn from pairs of answers have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf.config.supervised import DpoConfig, RewardModelConfig
from rlinf.errors import UserError
from rlinf.jobs.base import Score
from rlinf.jobs.supervised.job import SupervisedJob
from rlinf.jobs.supervised.source import ItemSource
from rlinf.tasks.example_tokens import ExampleEncoder
from rlinf.tasks.pictures import PictureReading
from rlinf.tasks.preferences import (
    PreferenceColumns,
    PreferenceRow,
    TokenizedPreference,
    fit_preferences,
    tokenized_preference,
)
from rlinf.tasks.rows import Row
from rlinf.tasks.spooled import SpooledRows
from rlinf_workers import FlowRun
from rlinf_workers.roles import Preference

LOSS = Score(name="loss", text="loss on held-out pairs", is_share=False, lower_is_better=True)
ACCURACY = Score(name="preference_accuracy", text="held-out pairs whose preferred answer has the larger reward")


class PreferenceSource(ItemSource[PreferenceRow, TokenizedPreference]):
    """Pairs of answers.

    Args:
        scores_whole: the answers are whole texts: with what a chat template writes behind them, without an end token of
            their own.
    """

    rows_of_item = 2
    columns_hint = (
        "name its columns: --task.columns.prompt NAME --task.columns.chosen NAME --task.columns.rejected NAME"
    )

    def __init__(self, config: DpoConfig | RewardModelConfig, *, scores_whole: bool = False) -> None:
        super().__init__(config, adds_end=not scores_whole)
        self._columns = PreferenceColumns(columns=config.task.columns, reading=PictureReading.as_set(config.task))
        self._scores_whole = scores_whole

    def read(self, row: Row) -> PreferenceRow:
        return self._columns(row)

    def columns_of(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        return self._columns.columns_of(values)

    def encoded(self, encoder: ExampleEncoder, row: PreferenceRow) -> TokenizedPreference:
        if self._scores_whole and row.chosen.pictures:
            raise UserError(
                f"{row.place} has pictures, and reward models are trained on text alone",
                hint="ignore the pictures with --task.columns.images false",
            )
        return tokenized_preference(encoder, row, is_whole=self._scores_whole)

    def fitted(
        self, examples: Sequence[TokenizedPreference], what: str
    ) -> tuple[SpooledRows[TokenizedPreference], list[str]]:
        return fit_preferences(examples, self._config.task.max_tokens, self._config.task.long_examples, what)

    def num_tokens(self, one: TokenizedPreference) -> int:
        return one.num_prompt_tokens + one.num_learned

    def item(self, index: int, one: TokenizedPreference, place: int, *, is_held_out: bool) -> Preference:
        return self.pair(index, one)

    def pair(self, index: int, one: TokenizedPreference, ref_logprobs: Tensor | None = None) -> Preference:
        """The item of a pair."""
        answers = [one.chosen_ids.long(), one.rejected_ids.long()]
        prompt_ids, _, pictures = self.inserted(one.prompt_ids, torch.zeros(len(one.prompt_ids)), one.pictures)
        return Preference(
            index=index,
            prompt_ids=prompt_ids,
            pictures=pictures,
            completion_ids=pad_sequence(answers, batch_first=True),
            loss_mask=pad_sequence([torch.ones(len(answer)) for answer in answers], batch_first=True),
            ref_logprobs=ref_logprobs,
        )


class PairJob(SupervisedJob):
    """A job whose items are pairs."""

    score = LOSS
    other_scores = (ACCURACY,)
    pads_prompts = True

    def evaluation_metrics(self, run: FlowRun) -> dict[str, float]:
        """Means over the held-out pairs."""
        loss, chosen, rejected, is_right, count = self.measured_sums(run)
        return {
            LOSS.name: loss / count,
            ACCURACY.name: is_right / count,
            "rewards/chosen": chosen / count,
            "rewards/rejected": rejected / count,
            "rewards/margin": (chosen - rejected) / count,
            "num_pairs": count,
        }

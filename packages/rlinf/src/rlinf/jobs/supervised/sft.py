"""The job `sft`: a language model learns from demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlinf.config.supervised import SftConfig
from rlinf.jobs.base import Score
from rlinf.jobs.supervised.job import SupervisedJob
from rlinf.jobs.supervised.source import ItemSource
from rlinf.machine import Machine
from rlinf.tasks.example_tokens import ExampleEncoder, TokenizedExample, fit_examples
from rlinf.tasks.examples import ExampleColumns, ExampleRow
from rlinf.tasks.pictures import PictureReading
from rlinf.tasks.rows import Row
from rlinf.tasks.spooled import SpooledRows
from rlinf_workers import FlowRun
from rlinf_workers.models import end_tokens
from rlinf_workers.roles import Example

LOSS = Score(name="loss", text="loss on held-out examples, nats a token", is_share=False, lower_is_better=True)
ACCURACY = Score(name="token_accuracy", text="tokens of held-out examples that are the most likely ones")


class DemonstrationSource(ItemSource[ExampleRow, TokenizedExample]):
    """Demonstrations."""

    columns_hint = (
        "name its columns: --task.columns.messages NAME for chats, or --task.columns.prompt NAME "
        "--task.columns.completion NAME, or --task.columns.text NAME"
    )

    def __init__(self, config: SftConfig) -> None:
        super().__init__(config, on_all=config.task.loss_on == "all")
        self._columns = ExampleColumns(columns=config.task.columns, reading=PictureReading.as_set(config.task))

    def read(self, row: Row) -> ExampleRow:
        return self._columns(row)

    def columns_of(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        return self._columns.columns_of(values)

    def encoded(self, encoder: ExampleEncoder, row: ExampleRow) -> TokenizedExample:
        return encoder.encode(row)

    def fitted(
        self, examples: Sequence[TokenizedExample], what: str
    ) -> tuple[SpooledRows[TokenizedExample], list[str]]:
        task, path = self._config.task, self._config.model.path
        examples, notes = fit_examples(examples, task.max_tokens, task.long_examples, what)
        ends = torch.tensor([one for ids in end_tokens(str(path), self.tokenizer).values() for one in ids])
        if not any(bool(torch.isin(one.token_ids[one.has_loss], ends).any()) for one in examples):
            notes.append(
                f"{what}: no token with a loss ends a completion, so the model does not learn to stop; does the chat "
                "template write an end token, inside {% generation %} where it has that?"
            )
        return examples, notes

    def num_tokens(self, one: TokenizedExample) -> int:
        return one.num_tokens

    def item(self, index: int, one: TokenizedExample, place: int, *, is_held_out: bool) -> Example:
        if not one.pictures:
            return Example(index=index, token_ids=one.token_ids.long(), loss_mask=one.has_loss.to(torch.float32))
        token_ids, has_loss, pictures = self.inserted(one.token_ids, one.has_loss, one.pictures)
        return Example(index=index, token_ids=token_ids, loss_mask=has_loss.to(torch.float32), pictures=pictures)


class SftJob(SupervisedJob):
    """Minimizes the negative log-likelihood of demonstrations."""

    config: SftConfig
    source_class = DemonstrationSource
    score = LOSS

    def __init__(self, config: SftConfig, machine: Machine) -> None:
        super().__init__(config, machine)
        self.other_scores = (ACCURACY,) if config.actor.trainer_spec.exposes_logits else ()

    def evaluation_metrics(self, run: FlowRun) -> dict[str, float]:
        """Means over the tokens of all held-out examples."""
        num_tokens, loss, *likeliest, num_examples = self.measured_sums(run)
        metrics = {LOSS.name: loss / num_tokens, "num_tokens": num_tokens, "num_examples": num_examples}
        if likeliest:
            metrics[ACCURACY.name] = likeliest[0] / num_tokens
        return metrics

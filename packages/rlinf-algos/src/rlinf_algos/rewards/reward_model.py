"""A reward model: a transformer with one output, in Hugging Face's format for sequence classification.

Preference models in that format (Skywork-Reward, ArmoRM and similar ones, TRL's RewardTrainer) read a conversation
through the tokenizer's chat template: the prompt is the user's turn, the completion the assistant's. If a call has no
prompts, the references are the prompts.
"""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_algos.errors import NonFiniteError, RewardError
from rlinf_algos.ranges import check_range
from rlinf_algos.rewards.base import RewardResult, judge_failure

_ROUNDED, _ROUNDED_IN_16_BITS = 1e-3, 0.1
"""Relative and absolute tolerance between scores, for rounding that depends on the order of sums."""


class RewardModel:
    """The unscaled score of a completion by the model: any finite number.

    If the tokenizer has a chat template, the model reads [{user: prompt}, {assistant: completion}] through it,
    otherwise prompt and completion one after the other. A completion cannot end its turn or begin another: special
    tokens with which the template marks turns are plain text there; `<|im_end|>` is read as `< |im_end|>`.

    Batches are padded on the right to their longest row. Each score equals, up to rounding, the score of the row alone
    with the folder's config, whatever the pad and end tokens are. Outcome: "right" with the score as value; "crashed"
    if the model fails on a row, with the lowest score of the call as value.

    Args:
        folder: a Hugging Face model folder with a tokenizer; one label.
        device: the device in torch's notation.
        dtype: type of the weights; by default that of the folder.
        batch_size: rows per forward pass.
        max_tokens: maximum tokens of a row; longer rows keep their end, where the answer is. By default the maximum of
            the model.

    Raises:
        RewardError: transformers is missing, the folder cannot be loaded, the model has more than one output, cannot
            score an example, or scores rows differently in a batch than alone.
    """

    reads_prompts = True
    depends_on_batch = True

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str = "auto",
        batch_size: int = 16,
        max_tokens: int | None = None,
    ) -> None:
        check_range("batch_size", batch_size, low=1, why="it is the number of rows of a forward pass")
        if importlib.util.find_spec("transformers") is None:
            raise RewardError("a reward model needs transformers: pip install 'rlinf-algos[model]'")
        if not (Path(folder) / "config.json").is_file():
            raise RewardError(f"the reward model's folder {folder} has no config.json; give a Hugging Face folder")
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        try:
            num_labels = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True).num_labels
            if num_labels != 1:
                raise RewardError(f"the model in {folder} has num_labels={num_labels}; a reward model has 1")
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            model: Any
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=dtype, trust_remote_code=False, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as e:
            if isinstance(e, RewardError):
                raise
            raise RewardError(f"the reward model in {folder} cannot be loaded: {e}") from e
        if loading["missing_keys"]:
            raise RewardError(
                f"the reward model in {folder} lacks {', '.join(sorted(loading['missing_keys'])[:3])}, which would be "
                "initialized randomly; is it a model for sequence classification?"
            )
        self._model = model.to(device).eval().requires_grad_(False)
        self._own_pad_id: int | None = model.config.get_text_config().pad_token_id
        self._device, self._batch_size = device, batch_size
        self._max_tokens = max_tokens or getattr(self._model.config, "max_position_embeddings", None)
        self._try_out(folder)

    def _try_out(self, folder: str | Path) -> None:
        """Checks that two rows have the same scores together and alone. XLNet, for example, scores the padding."""
        try:
            rows = [self._token_ids("2+2?", answer) for answer in ("4", "It is 4, for 2 + 2 = 4.")]
            together, alone = self._forward(rows), torch.cat([self._forward([row]) for row in rows])
        except Exception as e:
            raise RewardError(f"the reward model in {folder} cannot score a text: {type(e).__name__}: {e}") from e
        tolerance = _ROUNDED if self._model.dtype == torch.float32 else _ROUNDED_IN_16_BITS
        if self._batch_size > 1 and not torch.allclose(together, alone, tolerance, tolerance, equal_nan=True):
            raise RewardError(
                f"the reward model in {folder} scores rows differently in a batch ({together.tolist()}) than alone "
                f"({alone.tolist()}), since its architecture does not ignore padding; set batch_size to 1"
            )

    def close(self) -> None:
        """Does nothing: the memory is released with the object."""

    def __call__(self, completion: str, reference: str) -> RewardResult:
        return self.score_batch([completion], [reference])[0]

    def score_batch(
        self, completions: Sequence[str], references: Sequence[str], prompts: Sequence[str] | None = None
    ) -> tuple[RewardResult, ...]:
        """One score for each completion, in order; rows of similar length share a forward pass.

        Args:
            prompts: the prompts; None: the references are the prompts.
        """
        prompts = references if prompts is None else prompts
        scores: dict[int, float | Exception] = {}
        rows: dict[int, list[int]] = {}
        for i, (prompt, text) in enumerate(zip(prompts, completions, strict=True)):
            try:
                rows[i] = self._token_ids(prompt, text)
            except Exception as error:  # noqa: BLE001 - tokenizers and templates may raise anything
                scores[i] = error
        order = sorted(rows, key=lambda i: len(rows[i]))
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            scores.update(zip(chosen, self._scores([rows[i] for i in chosen]), strict=True))
        lowest = min((value for value in scores.values() if isinstance(value, float)), default=0.0)
        return tuple(_result(scores[i], lowest) for i in range(len(completions)))

    def _token_ids(self, prompt: str, completion: str) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None):
            for marker in self._markers:
                completion = completion.replace(marker, f"{marker[0]} {marker[1:]}")
            text = self._conversation(prompt, completion)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]  # the template adds them
        else:
            ids = self._tokenizer(prompt + completion)["input_ids"]
        if not ids:
            raise RewardError(f"prompt {prompt[-40:]!r} with completion {completion[-40:]!r} has no token to score")
        return ids[-self._max_tokens :] if self._max_tokens else ids

    def _conversation(self, prompt: str, completion: str) -> str:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return self._tokenizer.apply_chat_template(turns, tokenize=False)

    @cached_property
    def _markers(self) -> tuple[str, ...]:
        """The special tokens with which the template marks turns."""
        example = self._conversation("x", "x")
        added = self._tokenizer.added_tokens_decoder.values()
        return tuple(token.content for token in added if token.special and token.content in example)

    def _scores(self, rows: list[list[int]]) -> list[float | Exception]:
        """The score of each row, or the exception that prevented it. If a batch fails, each row is tried alone."""
        try:
            scores = self._forward(rows)
        except RuntimeError as error:
            if len(rows) == 1:
                return [error]
            return [self._scores([row])[0] for row in rows]
        return [
            value if math.isfinite(value) else NonFiniteError(f"the reward model's score is {value}")
            for value in scores.tolist()
        ]

    def _forward(self, rows: list[list[int]]) -> Tensor:
        """One logit for each row. A decoder reads it at the last token that is not config.pad_token_id, which does not
        find the padding if pad and end are the same token or the tokenizer pads with another one. So a batch is padded
        with a token that occurs in none of its rows, and the config temporarily names that token. Rows whose end the
        model would skip, or that contain every token of the vocabulary, run alone."""
        pad_id = self._unused_id(rows)
        if len(rows) > 1 and pad_id is not None and all(row[-1] != self._own_pad_id for row in rows):
            return self._logits(rows, pad_id)
        return torch.cat([self._logits([row], self._own_pad_id) for row in rows])

    @torch.no_grad()
    def _logits(self, rows: list[list[int]], pad_id: int | None) -> Tensor:
        width = max(map(len, rows))
        token_ids = torch.full((len(rows), width), pad_id or 0)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            token_ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        self._set_pad_id(pad_id)
        try:
            logits = self._model(input_ids=token_ids.to(self._device), attention_mask=mask.to(self._device)).logits
        finally:
            self._set_pad_id(self._own_pad_id)
        return logits[:, 0].float().cpu()

    def _unused_id(self, rows: list[list[int]]) -> int | None:
        """A token of the vocabulary that occurs in none of the rows; None if they contain all tokens."""
        used = set().union(*rows)
        return next((i for i in range(self._model.get_input_embeddings().num_embeddings) if i not in used), None)

    def _set_pad_id(self, pad_id: int | None) -> None:
        for config in (self._model.config, self._model.config.get_text_config()):
            config.pad_token_id = pad_id


def _result(score: float | Exception, lowest: float) -> RewardResult:
    if isinstance(score, Exception):
        return replace(judge_failure(score), value=lowest, has_verdict=False)
    return RewardResult(value=score, outcome="right", has_verdict=False)

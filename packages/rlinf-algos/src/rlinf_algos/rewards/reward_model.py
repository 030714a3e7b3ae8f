"""A reward model: a transformer with one output, as Hugging Face's sequence classification saves it.

Preference models in that form (Skywork-Reward, ArmoRM's kin, TRL's RewardTrainer) read a conversation through the
tokenizer's chat template: the prompt is the user's turn, the completion the assistant's. A caller without prompts
passes them as references.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_algos.checks import check_finite, check_range
from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import RewardResult


class RewardModel:
    """The model's score of a completion, as it is: any finite number.

    Where the tokenizer has a chat template the model reads [{user: prompt}, {assistant: completion}] through it,
    else prompt and completion one after the other. Batches are padded on the right to their longest row; a score is
    that of its row alone up to rounding. Outcome: always "right"; the value says how good.

    Args:
        folder: a Hugging Face model folder with a tokenizer; one label.
        device: the device in torch's notation.
        dtype: type of the weights; by default what the folder says.
        batch_size: rows of a forward pass.
        max_tokens: most tokens of a row; a longer one keeps its end, where the answer is. By default what the model can
            read.

    Raises:
        RewardError: transformers is missing, the folder cannot be loaded, or the model has more than one output.
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
            raise RewardError(f"the reward model's folder {folder} holds no config.json; give a Hugging Face folder")
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        try:
            num_labels = AutoConfig.from_pretrained(folder, local_files_only=True).num_labels
            if num_labels != 1:
                raise RewardError(f"the model in {folder} has num_labels={num_labels}; a reward model has 1")
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as e:
            if isinstance(e, RewardError):
                raise
            raise RewardError(f"the reward model in {folder} cannot be loaded: {e}") from e
        if loading["missing_keys"]:
            raise RewardError(
                f"the reward model in {folder} lacks {', '.join(sorted(loading['missing_keys'])[:3])}, which would be "
                "random; is it a model for sequence classification?"
            )
        self._model = model
        self._pad_id = self._padding()
        self._model.config.pad_token_id = self._pad_id  # by which the model finds the last token of a row
        self._model.to(device).eval().requires_grad_(False)
        self._device, self._batch_size = device, batch_size
        self._max_tokens = max_tokens or getattr(self._model.config, "max_position_embeddings", None)

    def _padding(self) -> int:
        """The tokenizer's pad id, else the config's, else the end of text, in this order."""
        for source in (self._tokenizer, self._model.config):
            if source.pad_token_id is not None:
                return int(source.pad_token_id)
        if self._tokenizer.eos_token_id is None:
            raise RewardError("the reward model's tokenizer has neither a pad nor an end token; set its pad_token")
        return int(self._tokenizer.eos_token_id)

    def close(self) -> None:
        """Does nothing: only memory is held, and it goes with the object."""

    def __call__(self, completion: str, reference: str) -> RewardResult:
        return self.score_batch([completion], [reference])[0]

    def score_batch(
        self, completions: Sequence[str], references: Sequence[str], prompts: Sequence[str] | None = None
    ) -> tuple[RewardResult, ...]:
        """One score for each completion, in order; rows of like length share a forward pass.

        Args:
            prompts: what was asked; None: the references hold it.

        Raises:
            NonFiniteError: the model gave a NaN or an infinity.
            RewardError: a row without a token.
        """
        prompts = references if prompts is None else prompts
        rows = [self._token_ids(prompt, text) for text, prompt in zip(completions, prompts, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores = torch.zeros(len(rows))
        for start in range(0, len(rows), self._batch_size):
            chosen = order[start : start + self._batch_size]
            scores[chosen] = self._forward([rows[i] for i in chosen])
        check_finite("reward model scores", scores)
        return tuple(RewardResult(value=value, outcome="right", has_verdict=False) for value in scores.tolist())

    def _token_ids(self, prompt: str, completion: str) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            text = self._tokenizer.apply_chat_template(turns, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has them
        else:
            ids = self._tokenizer(prompt + completion)["input_ids"]
        if not ids:
            raise RewardError(f"prompt {prompt[-40:]!r} with completion {completion[-40:]!r} has no token to score")
        return ids[-self._max_tokens :] if self._max_tokens else ids

    @torch.no_grad()
    def _forward(self, rows: list[list[int]]) -> Tensor:
        width = max(map(len, rows))
        token_ids = torch.full((len(rows), width), self._pad_id)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            token_ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        logits = self._model(input_ids=token_ids.to(self._device), attention_mask=mask.to(self._device)).logits
        return logits[:, 0].float().cpu()

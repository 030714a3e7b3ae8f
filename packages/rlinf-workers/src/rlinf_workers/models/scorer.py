"""A reward model: a transformer with one number for a whole text, read at its last token.

In memory it is a causal language model whose head has one row, so it is batched and packed like the others. Its files
are those of transformers' class for sequence classification with one label, which `reward.kind: model` and other tools
load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_workers.models.language_model import build_model, load_tokenizer
from rlinf_workers.models.trainable import ValueModel
from rlinf_workers.models.weight_names import StoredWeights, converted_together, under_file_names

SCORE = "score.weight"
"""What transformers calls the head in a file."""


class ScoreModel(ValueModel):
    """The score of a text is the value behind its last token. A batch gives the values before its completion tokens, so
    a completion has one more token than the text, which stands for its end and is not computed. The head begins at 0
    for a folder of a language model, and as it is for one of a reward model."""

    def build(self, device: torch.device) -> nn.Module:
        if not is_scorer(self.settings.folder):
            return _with_score_head(build_model(self.settings, torch.device("cpu"))).to(device)
        loaded = _load(self.settings.folder, getattr(torch, self.settings.dtype))
        model = _with_score_head(_language_model_of(loaded, self.settings.dtype))
        _copy(loaded, model)
        return model.to(device)

    def outline(self) -> None:
        """It can only be built whole."""
        return None

    def first_weights(self, model: Any) -> StoredWeights | None:
        return None

    def written_together(self, model: Any, names: Iterable[str]) -> Iterable[Sequence[str]]:
        return converted_together(model, names)

    def to_files(self, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = _head_name(model)
        return under_file_names(model, {(SCORE if name == head else name): one for name, one in tensors.items()})

    def describe(self, folder: str) -> None:
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

        tokenizer = load_tokenizer(self.settings.folder)
        config = AutoConfig.from_pretrained(self.settings.folder, trust_remote_code=False, local_files_only=True)
        config.dtype, config.num_labels = self.settings.dtype, 1
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id
        model_class: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        config.architectures = [model_class.__name__]
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def load(self, model: Any, folder: str) -> None:
        """Through transformers' own loader."""
        _copy(_load(folder, next(model.parameters()).dtype), model)


def is_scorer(folder: str | Path) -> bool:
    """Whether a folder holds a reward model, by the architecture that its config names."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return any(str(name).endswith("ForSequenceClassification") for name in config.architectures or ())


def _load(folder: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=dtype, num_labels=1, trust_remote_code=False, local_files_only=True
    )


def _language_model_of(loaded: Any, dtype: str) -> Any:
    """A language model of the same config, whose weights are not those of the reward model yet."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        return AutoModelForCausalLM.from_config(loaded.config, dtype=getattr(torch, dtype)).eval()


def _with_score_head(model: Any) -> Any:
    head = nn.Linear(model.get_output_embeddings().in_features, 1, bias=False, dtype=model.dtype)
    nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    return model


def _head_name(model: Any) -> str:
    """The name of the head's weight in memory."""
    weight = model.get_output_embeddings().weight
    return next(name for name, parameter in model.named_parameters() if parameter is weight)


def _copy(loaded: Any, model: Any) -> None:
    tensors = loaded.state_dict()
    tensors[_head_name(model)] = tensors.pop(SCORE)
    model.load_state_dict(tensors)

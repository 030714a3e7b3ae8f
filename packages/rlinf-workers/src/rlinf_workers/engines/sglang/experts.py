"""The experts of each token, as SGLang returns them for a finished request (`return_routed_experts`).

SGLang keeps the choices of all layers with the KV cache, one row for each token that it computed: a sequence of N
tokens has N - 1 rows, because the last one is never computed. A prompt is computed once for its completions, except its
last token, which each completion computes again; the rows before it come with the request that computes the prompt.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.errors import SettingsRefused, WorkersError

MAX_UINT8_EXPERTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """The rows of a model of the Qwen-MoE families."""

    num_layers: int
    num_choices: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ExpertRows:
        """From the config.json of a model.

        Raises: SettingsRefused for a model without routers, or with layers that have none: SGLang 0.5.23 builds all
            layers of these families with experts.
        """
        num_experts = config.get("num_experts") or config.get("num_local_experts") or 0  # by version of transformers
        if not num_experts or config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) > 1:
            raise SettingsRefused(
                "engine_options.enable_return_routed_experts=true needs a model with experts in every layer; leave it "
                "out, or use the engine huggingface"
            )
        return cls(
            num_layers=config["num_hidden_layers"],
            num_choices=config["num_experts_per_tok"],
            dtype=torch.uint8 if num_experts <= MAX_UINT8_EXPERTS else torch.int16,
        )

    def read(self, encoded: str | None, num_rows: int) -> Tensor:
        """[num_rows, layers, k], from `routed_experts` of an output. Raises: WorkersError if they are missing."""
        numbers = np.frombuffer(base64.b64decode(encoded or ""), dtype=np.int32)
        if numbers.size != num_rows * self.num_layers * self.num_choices:
            raise WorkersError(
                f"SGLang returned {numbers.size} experts, not {num_rows} tokens x {self.num_layers} layers x "
                f"{self.num_choices}"
            )
        return torch.tensor(numbers.reshape(num_rows, self.num_layers, self.num_choices), dtype=self.dtype)

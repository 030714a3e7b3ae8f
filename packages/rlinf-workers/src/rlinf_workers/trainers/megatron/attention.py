"""Causal attention by torch's fused kernels; megatron-core's own keeps [S, S] scores for every head, and has none for
packed rows."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlinf_workers.trainers.megatron.queries import PackedRow


class CausalAttention(MegatronModule):
    """Replaces DotProductAttention in a layer spec. Padding must come after the tokens."""

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedRow | None = None, **__: Any
    ) -> Tensor:
        """query [S, R, heads, D], key and value [S, R, groups, D] -> [S, R, heads * D]

        Args:
            packed_seq_params: megatron-core's name; of a packed row, whose R is 1, and whose queries and keys are not
                rotated yet.
        """
        row = packed_seq_params
        if row is not None:
            query, key = row.rotated(query), row.rotated(key)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        if row is not None:
            output = row.attention(q, k, v, scale=q.shape[-1] ** -0.5, window=None, softcap=None)  # [1, S, heads, D]
            return output.transpose(0, 1).flatten(2)
        if q.is_cuda and q.dtype == torch.float32:  # here the kernels that support shared keys would keep all scores
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return output.permute(2, 0, 1, 3).flatten(2)

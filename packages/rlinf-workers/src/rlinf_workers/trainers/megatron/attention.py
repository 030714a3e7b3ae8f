"""Causal attention by torch's fused kernels; megatron-core's own keeps [S, S] scores for every head, and has none for
packed rows."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlinf_workers.models.packed_attention import as_wide
from rlinf_workers.trainers.megatron.queries import PackedRow


class CausalAttention(MegatronModule):
    """Replaces DotProductAttention in a layer spec. Padding must come after the tokens.

    Args:
        softmax_scale: of the scores; None: that of the queries' length. Latent attention, which sets it, has rotated
            queries and keys, and values of another length.
    """

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self._scale, self._is_rotated = softmax_scale, config.multi_latent_attention

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedRow | None = None, **__: Any
    ) -> Tensor:
        """query [S, R, heads, D], key [S, R, groups, D] and value [S, R, groups, V] -> [S, R, heads * V]

        Args:
            packed_seq_params: megatron-core's name; of a packed row, whose R is 1, and whose queries and keys are not
                rotated yet.
        """
        row = packed_seq_params
        if row is not None and not self._is_rotated:
            query, key = row.rotated(query), row.rotated(key)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, as_wide(value, query)))
        scale = self._scale or q.shape[-1] ** -0.5
        if row is not None:
            output = row.attention(q, k, v, scale=scale, window=None, softcap=None)  # [1, S, heads, V]
            return output[..., : value.shape[-1]].transpose(0, 1).flatten(2)
        if q.is_cuda and q.dtype == torch.float32:  # here the kernels that support shared keys would keep all scores
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        shares = q.shape[1] != k.shape[1]
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shares)
        return output[..., : value.shape[-1]].permute(2, 0, 1, 3).flatten(2)

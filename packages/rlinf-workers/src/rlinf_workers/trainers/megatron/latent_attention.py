"""DeepSeek's latent attention (MLA, arXiv:2405.04434) in megatron-core's layers.

Its modules and weights are megatron-core's; what it computes with them stands here, because positions are those of a
packed row, YaRN's numbers are those that transformers computes, and the gradient of the key that all heads share has to
be summed over the tensor parallel ranks, which have different heads.

Legend: S positions of a row, R rows, n heads of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from rlinf_workers.trainers.megatron.queries import Frequencies, PackedRow

if not isinstance(multi_latent_attention.TELinear, type):  # 0.16.1 takes its placeholders for Transformer Engine
    setattr(multi_latent_attention, "HAVE_TE", False)  # noqa: B010


class LatentSelfAttention(MLASelfAttention):
    """Replaces MLASelfAttention in a layer spec."""

    q_layernorm: Any
    kv_layernorm: Any
    frequencies: Frequencies
    """Set by `install`, as `is_interleaved`."""
    is_interleaved: bool
    """A pair of numbers that are rotated stands side by side, and not half of them apart."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: PackedRow | None = None,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """hidden_states [S, R, H], of sequence parallel ranks [S / tp, R, H] -> queries and keys [S, R, n, D], values
        [S, R, n, V], and nothing for megatron-core's caches of latent vectors."""
        config: Any = self.config
        content, num_heads = config.qk_head_dim, self.num_attention_heads_per_partition
        if config.q_lora_rank is None:
            queries, _ = self.linear_q_proj(hidden_states)
        else:
            latent, _ = self.linear_q_down_proj(hidden_states)
            queries, _ = self.linear_q_up_proj(self.q_layernorm(self._of_rank(self._whole(latent))))
        queries = queries.unflatten(-1, (num_heads, self.q_head_dim))
        combined, _ = self.linear_kv_down_proj(hidden_states)
        latent, shared_key = self._whole(combined).split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(self._of_rank(latent)))
        keys, values = both.unflatten(-1, (num_heads, content + config.v_head_dim)).split(
            [content, config.v_head_dim], -1
        )
        shared_key = copy_to_tensor_model_parallel_region(shared_key)[:, :, None]
        if packed_seq_params is None:
            cos, sin = self.frequencies.at(torch.arange(len(queries), device=queries.device))
        else:
            assert packed_seq_params.rotations is not None, "the model sets them"
            cos, sin = packed_seq_params.rotations
        cos, sin = (part[:, None].to(queries.dtype) for part in (cos, sin))  # [S, 1, 1, r / 2]
        rotated = self._rotated(queries[..., content:], cos, sin)
        rotated_key = self._rotated(shared_key, cos, sin).expand(-1, -1, num_heads, -1)
        query, key = torch.cat([queries[..., :content], rotated], -1), torch.cat([keys, rotated_key], -1)
        return query, key, values, None, None

    def _whole(self, latent: Tensor) -> Tensor:
        """Latent vectors of which each tensor parallel rank computes some numbers."""
        return gather_from_tensor_model_parallel_region(latent)

    def _of_rank(self, latent: Tensor) -> Tensor:
        """The positions whose norm this rank computes."""
        return scatter_to_sequence_parallel_region(latent) if self.config.sequence_parallel else latent

    def _rotated(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = (states[..., 0::2], states[..., 1::2]) if self.is_interleaved else states.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def install(model: nn.Module, frequencies: Frequencies, *, is_interleaved: bool) -> None:
    """Sets how the layers of a model rotate queries and keys."""
    for module in model.modules():
        if isinstance(module, LatentSelfAttention):
            module.frequencies, module.is_interleaved = frequencies, is_interleaved

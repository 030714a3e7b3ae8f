"""Layouts of the trainers and engines that there are, for transformers named as on the Hugging Face hub.

    shape.py        TransformerShape: the sizes of a model, from its config (config.py)
    canonical.py    the names and shapes of its tensors in the checkpoint
    tower.py        the vision towers of Qwen2.5-VL and Qwen3-VL
    siglip.py       that of SmolVLM
    huggingface.py  whole tensors, as transformers holds them
    fsdp2.py        any model under fully_shard, from its DTensors
    megatron.py     Megatron-Core: tensor, pipeline, expert and expert-tensor parallelism
    merged.py       SGLang and vLLM: merged qkv, gate_up and experts
    quantized.py    of any trainer whose weights are quantized to FP8 before they are sent
    adapters.py     LoRA adapters that are served beside the weights that they change

All return a Layout whose buffers have the parameter names of the engine, so that a rank's tensors are
`dict(model.named_parameters())`.
"""

from __future__ import annotations

from rlinf_comm.weights.layouts.adapters import LORA_A, LORA_B, adapted_layout, has_adapter, is_adapter_tensor
from rlinf_comm.weights.layouts.assembly import rounded_up
from rlinf_comm.weights.layouts.config import MODEL_TYPES
from rlinf_comm.weights.layouts.fsdp2 import fsdp2_layout, local_shards, shard_boxes
from rlinf_comm.weights.layouts.huggingface import huggingface_layout
from rlinf_comm.weights.layouts.megatron import megatron_layout
from rlinf_comm.weights.layouts.merged import merged_layout
from rlinf_comm.weights.layouts.quantized import is_quantized, quantized_layout, quantized_names, scales_of
from rlinf_comm.weights.layouts.shape import LatentAttention, TransformerShape
from rlinf_comm.weights.layouts.siglip import SiglipTower
from rlinf_comm.weights.layouts.tower import QwenTower

__all__ = [
    "TransformerShape",
    "LatentAttention",
    "QwenTower",
    "SiglipTower",
    "huggingface_layout",
    "fsdp2_layout",
    "local_shards",
    "megatron_layout",
    "merged_layout",
]
__all__ += ["shard_boxes", "rounded_up", "is_quantized", "scales_of", "quantized_names", "quantized_layout"]
__all__ += ["MODEL_TYPES", "LORA_A", "LORA_B", "adapted_layout", "has_adapter", "is_adapter_tensor"]

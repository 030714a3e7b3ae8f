"""The order of experts in files of Qwen3-VL-MoE, which have the matrices of all experts of a layer in one tensor."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

FUSED = (".experts.gate_up_proj", ".experts.down_proj")
"""Endings of the names of these tensors."""


def experts_as_modelled(folder: Path) -> bool:
    """Whether files have each expert's matrix as its model has it, [outputs, inputs], as transformers 5 writes them.
    Published files have it transposed, and neither SGLang 0.5.23 nor vLLM 0.32.0 knows the other order."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    # of a square matrix the shape says nothing; then the other one is none
    ending, shape = (FUSED[1], (hidden, inner)) if hidden != inner else (FUSED[0], (2 * inner, hidden))
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if own := [one for one in tensors.keys() if one.endswith(ending)]:  # noqa: SIM118
                return tuple(tensors.get_slice(own[0]).get_shape()[1:]) == shape
    return False

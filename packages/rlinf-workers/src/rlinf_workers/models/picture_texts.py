"""How the text of a model shows a picture, by its family. Imports no torch."""

from __future__ import annotations

MARKER = "<image>"
"""Where a problem's text has a picture."""
PICTURE_TEXTS = {
    "qwen2_5_vl": "<|vision_start|>{}<|vision_end|>",
    "qwen3_vl": "<|vision_start|>{}<|vision_end|>",
    "qwen3_vl_moe": "<|vision_start|>{}<|vision_end|>",
    "smolvlm": "{}",
}
"""`model_type` of the models whose pictures are read -> what stands for a picture in a plain prompt, with {} for the
placeholder."""
TILED = frozenset({"smolvlm"})
"""Those whose pictures are tiles, with a dimension for the batch before them."""
VIDEO_MODELS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Those whose videos are read too."""

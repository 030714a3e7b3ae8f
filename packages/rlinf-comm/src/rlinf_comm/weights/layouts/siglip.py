"""The vision tower of SmolVLM, a SigLIP whose features a connector projects; transformers names its tensors
`model.vision_model.*` and `model.connector.*`.

vLLM (0.32.0, models/idefics3.py and idefics2_vision_model.py) keeps these names, with query, key and value of a layer
in one parameter. A rank of several has its heads of each of the three, one after the other, and its rows and columns of
the MLPs. Embeddings, norms, the connector, and biases of layers that are cut by columns are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlinf_comm.errors import LayoutError
from rlinf_comm.records import record
from rlinf_comm.weights.layouts.assembly import RankAssembly, check_divides
from rlinf_comm.weights.layouts.tower import TowerSizes, linear, vision_config

DECODERS = {"smolvlm": "llama"}
"""`model_type` of a model with such a tower -> that of its decoder."""
VISION, CONNECTOR = "model.vision_model.", "model.connector.modality_projection.proj.weight"


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class SiglipTower:
    """The tower and the connector, which makes a token of `scale_factor` x `scale_factor` patches.

    Example: SmolVLM2-500M
        SiglipTower(num_layers=12, hidden=768, num_heads=12, intermediate=3072, out_hidden=960, patch=(3, 16, 16),
                    patches_per_token=16, num_positions=1024)
    """

    DECODER_PREFIX: ClassVar[str] = "model.text_model."
    """Of the decoder's canonical tensors, but for the head."""

    num_layers: int
    hidden: int
    num_heads: int
    intermediate: int
    out_hidden: int
    """Hidden width of the decoder."""
    patch: tuple[int, int, int]
    """Channels, rows and columns of a patch."""
    patches_per_token: int
    num_positions: int
    """Rows of the position embedding, one for each patch of a tile."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SiglipTower | None:
        """Reads a Hugging Face config; None for a model without such a tower."""
        if config.get("model_type") not in DECODERS:
            return None
        vision = vision_config(config)
        size = vision["patch_size"]
        return cls(
            num_layers=vision["num_hidden_layers"],
            hidden=vision["hidden_size"],
            num_heads=vision["num_attention_heads"],
            intermediate=vision["intermediate_size"],
            out_hidden=config["text_config"]["hidden_size"],
            patch=(vision.get("num_channels", 3), size, size),
            patches_per_token=config["scale_factor"] ** 2,
            num_positions=(vision["image_size"] // size) ** 2,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The canonical tensors and their shapes."""
        hidden, inner = self.hidden, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings.patch_embedding.weight": (hidden, *self.patch),
            "embeddings.patch_embedding.bias": (hidden,),
            "embeddings.position_embedding.weight": (self.num_positions, hidden),
        }
        norms = ["post_layernorm"]
        for layer in range(self.num_layers):
            prefix = f"encoder.layers.{layer}."
            norms += [f"{prefix}layer_norm1", f"{prefix}layer_norm2"]
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes |= linear(f"{prefix}self_attn.{part}", hidden, hidden)
            shapes |= linear(f"{prefix}mlp.fc1", inner, hidden) | linear(f"{prefix}mlp.fc2", hidden, inner)
        shapes |= {f"{norm}.{kind}": (hidden,) for norm in norms for kind in ("weight", "bias")}
        whole = {VISION + name: shape for name, shape in shapes.items()}
        return {**whole, CONNECTOR: (self.out_hidden, hidden * self.patches_per_token)}

    def add_to(self, rank: RankAssembly, tp_rank: int, sizes: TowerSizes) -> None:
        """Adds the parameters of one of an engine's ranks.

        Raises: LayoutError if its heads, or its MLPs, cannot be cut evenly, and for padding, which no engine gives it.
        """
        tp = sizes.tp
        if sizes != TowerSizes(tp=tp):
            raise LayoutError(f"{sizes}: no engine pads this tower, or cuts its positions")
        check_divides("vision_config.num_attention_heads", self.num_heads, "tp", tp)
        check_divides("vision_config.intermediate_size", self.intermediate, "tp", tp)
        for name, shape in self.shapes().items():
            layer, _, kind = name.rpartition(".")
            if layer.endswith(".q_proj"):
                names = [name.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
                parts = [(one, rank.slice_of(one, 0, tp_rank, tp)) for one in names]
                rows = sum(box.shape[0] for _, box in parts)
                rank.add(name.replace(".q_proj.", ".qkv_proj."), parts, (rows, *shape[1:]))
            elif layer.endswith((".k_proj", ".v_proj")):
                continue
            elif layer.endswith(".fc1"):
                rank.add_box(name, name, rank.slice_of(name, 0, tp_rank, tp))
            elif layer.endswith((".out_proj", ".fc2")) and kind == "weight":
                rank.add_box(name, name, rank.slice_of(name, 1, tp_rank, tp))
            else:
                rank.add_whole(name, name)

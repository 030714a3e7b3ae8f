"""The vision towers of Qwen2.5-VL and Qwen3-VL, whose tensors transformers names `model.visual.*`.

Query, key and value are one tensor in the checkpoint and in the engines. A rank of several has its heads of each of the
three, one after the other; of a gated MLP it has its rows of gate and up in one parameter. Biases of layers that are
cut by columns are whole on every rank, which adds them once (vLLM 0.32.0, models/qwen2_5_vl.py and qwen3_vl.py).
SGLang (0.5.23) cuts the position embedding by rows, and gives the MLPs of Qwen2.5-VL rows up to a multiple of 8, 3,424
for 3,420; the last rank has what is too much, which has to be zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlinf_comm.errors import LayoutError
from rlinf_comm.records import record
from rlinf_comm.weights.layout import Block
from rlinf_comm.weights.layouts.assembly import RankAssembly, check_divides, interval, rounded_up
from rlinf_comm.weights.region import dense_strides

DECODERS = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
"""`model_type` of a model with such a tower -> that of its decoder."""
CANONICAL, SERVED = "model.visual.", "visual."
"""Prefixes of the tower's tensors in the checkpoint and in an engine."""


POSITIONS_MULTIPLE = 64
"""Where the position embedding is cut, its rows are padded to a multiple of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerSizes:
    """How an engine cuts and pads a tower."""

    tp: int = 1
    """Tensor parallelism of its layers."""
    mlp_width: int | None = None
    """Rows of the MLPs of its blocks, over all ranks; None: as many as the model has."""
    positions_tp: int | None = None
    """Tensor parallelism of the position embedding; None: every rank has it whole."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class QwenTower:
    """The tower and what projects its features into the decoder's hidden states.

    Example: Qwen2.5-VL-7B
        QwenTower(gated=True, num_layers=32, hidden=1280, num_heads=16, intermediate=3420, out_hidden=3584,
                    patch=(3, 2, 14, 14), patches_per_token=4)
    """

    DECODER_PREFIX: ClassVar[str] = "model.language_model."
    """Of the decoder's canonical tensors, but for the head."""

    gated: bool
    """Qwen2.5-VL's: gated MLPs and norms without biases; otherwise Qwen3-VL's."""
    num_layers: int
    hidden: int
    num_heads: int
    intermediate: int
    out_hidden: int
    """Hidden width of the decoder."""
    patch: tuple[int, int, int, int]
    """Channels, frames, rows and columns of a patch."""
    patches_per_token: int
    num_positions: int = 0
    """Rows of the learned position embedding; 0 in Qwen2.5-VL."""
    num_deepstack: int = 0
    """Number of layers whose features also go into layers of the decoder."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QwenTower | None:
        """Reads `vision_config` of a Hugging Face config; None for a model without such a tower."""
        kind = config.get("model_type")
        if kind not in DECODERS:
            return None
        vision = vision_config(config)
        gated, size = kind == "qwen2_5_vl", vision["patch_size"]
        return cls(
            gated=gated,
            num_layers=vision["depth"],
            hidden=vision["hidden_size"],
            num_heads=vision["num_heads"],
            intermediate=vision["intermediate_size"],
            out_hidden=vision["out_hidden_size"],
            patch=(vision.get("in_channels", 3), vision.get("temporal_patch_size", 2), size, size),
            patches_per_token=vision.get("spatial_merge_size", 2) ** 2,
            num_positions=0 if gated else vision["num_position_embeddings"],
            num_deepstack=0 if gated else len(vision.get("deepstack_visual_indexes") or ()),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The canonical tensors and their shapes."""
        norms = ("weight",) if self.gated else ("weight", "bias")
        shapes = {"patch_embed.proj.weight": (self.hidden, *self.patch)}
        if not self.gated:
            shapes |= {"patch_embed.proj.bias": (self.hidden,), "pos_embed.weight": (self.num_positions, self.hidden)}
        for layer in range(self.num_layers):
            prefix = f"blocks.{layer}."
            shapes |= {f"{prefix}norm{n}.{kind}": (self.hidden,) for n in (1, 2) for kind in norms}
            for name, rows, columns in self._linears():
                shapes |= linear(prefix + name, rows, columns)
        merged = self.hidden * self.patches_per_token
        for prefix, norm, first, second, width in self._mergers():
            shapes |= {f"{prefix}{norm}.{kind}": (width,) for kind in norms}
            shapes |= linear(prefix + first, merged, merged) | linear(prefix + second, self.out_hidden, merged)
        return {CANONICAL + name: shape for name, shape in shapes.items()}

    def add_to(self, rank: RankAssembly, tp_rank: int, sizes: TowerSizes) -> None:
        """Adds the parameters of one of an engine's ranks.

        Raises: LayoutError if its heads, or the width of its MLP, cannot be cut evenly.
        """
        tp, width = sizes.tp, sizes.mlp_width or self.intermediate
        check_divides("vision_config.num_heads", self.num_heads, "tp", tp)
        check_divides("vision_config.intermediate_size", width, "tp", tp)
        by_rows, by_columns = self._cuts()
        inner = width // tp
        first = min(tp_rank * inner, self.intermediate)
        count = min(inner, self.intermediate - first)
        for name, shape in self.shapes().items():
            here = SERVED + name.removeprefix(CANONICAL)
            layer, _, kind = name.rpartition(".")
            if layer.endswith(".attn.qkv"):
                size = self.hidden // tp
                boxes = [interval(shape, 0, part * self.hidden + tp_rank * size, size) for part in range(3)]
                rank.add(here, [(name, box) for box in boxes], (3 * size, *shape[1:]))
            elif layer.endswith((".gate_proj", ".up_proj")):
                here = re.sub("gate_proj|up_proj", "gate_up_proj", here)
                offset = 0 if layer.endswith(".gate_proj") else inner * math.prod(shape[1:])
                box = interval(shape, 0, first, count)
                rank.add_block(Block(name, box, here, offset, dense_strides(shape, 1)), (2 * inner, *shape[1:]))
            elif layer.endswith(".mlp.linear_fc1"):
                rank.add(here, [(name, interval(shape, 0, first, count))], (inner, *shape[1:]))
            elif layer.endswith((".mlp.down_proj", ".mlp.linear_fc2")) and kind == "weight":
                box = interval(shape, 1, first, count)
                rank.add_block(Block(name, box, here, 0, (inner, 1)), (shape[0], inner))
            elif layer == f"{CANONICAL}pos_embed" and sizes.positions_tp is not None:
                num_padded = rounded_up(self.num_positions, POSITIONS_MULTIPLE)
                rank.add_vocab(here, name, num_padded, tp_rank % sizes.positions_tp, sizes.positions_tp)
            elif layer.endswith(by_rows):
                rank.add_box(here, name, rank.slice_of(name, 0, tp_rank, tp))
            elif layer.endswith(by_columns) and kind == "weight":
                rank.add_box(here, name, rank.slice_of(name, 1, tp_rank, tp))
            else:
                rank.add_whole(here, name)

    def _linears(self) -> list[tuple[str, int, int]]:
        """Linear layers of a block: name, rows and columns."""
        hidden, inner = self.hidden, self.intermediate
        attention = [("attn.qkv", 3 * hidden, hidden), ("attn.proj", hidden, hidden)]
        if self.gated:
            gate, up, down = (f"mlp.{part}_proj" for part in ("gate", "up", "down"))
            return [*attention, (gate, inner, hidden), (up, inner, hidden), (down, hidden, inner)]
        return [*attention, ("mlp.linear_fc1", inner, hidden), ("mlp.linear_fc2", hidden, inner)]

    def _mergers(self) -> Iterator[tuple[str, str, str, str, int]]:
        """What joins patches to tokens: prefix, names of its norm and of its two layers, and the norm's width."""
        if self.gated:
            yield "merger.", "ln_q", "mlp.0", "mlp.2", self.hidden
            return
        yield "merger.", "norm", "linear_fc1", "linear_fc2", self.hidden
        for number in range(self.num_deepstack):
            width = self.hidden * self.patches_per_token
            yield f"deepstack_merger_list.{number}.", "norm", "linear_fc1", "linear_fc2", width

    def _cuts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Ends of names of the other layers that are cut by rows, and of those that are cut by columns."""
        if self.gated:
            return (".merger.mlp.0",), (".attn.proj", ".merger.mlp.2")
        return (".linear_fc1",), (".attn.proj", ".linear_fc2")


def vision_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a Hugging Face config with the sizes of the tower. Raises: LayoutError if it is missing."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise LayoutError(
            f"{config.get('model_type')}: config.json has no vision_config, which describes the vision tower; add it"
        )
    return vision


def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a linear layer with a bias."""
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

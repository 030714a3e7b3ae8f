"""Low-rank adapters (LoRA, arXiv:2106.09685): the number of trained weights when the model itself is frozen."""

from dataclasses import dataclass, replace

from rlinf_sched.derive.memory.rank import RankMemory
from rlinf_sched.derive.shapes import ModelShape

FLOAT_BYTES = 4
"""Bytes of one float32 number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The adapter of a decoder of the Llama family, and of its vision tower; its weights are float32 whatever the model
    is."""

    rank: int
    targets: tuple[str, ...] | None = None
    """Linear layers by their names' ends in transformers' models, each in every layer of the decoder; None: all but the
    head, those of the vision tower too."""

    def num_parameters(self, model: ModelShape) -> int:
        """rank * (inputs + outputs) of each layer that is changed; one of an unknown name counts as a square one."""
        widths = _widths(model)
        decoder = model.num_layers * sum(widths.get(end, 2 * model.hidden_size) for end in self.ends(model))
        return self.rank * (decoder + (model.vision_widths if self.targets is None else 0))

    def ends(self, model: ModelShape) -> frozenset[str]:
        """How the names of the layers end that are changed."""
        if self.targets is None:
            return frozenset(_widths(model))
        return frozenset(target.rpartition(".")[2] for target in self.targets)

    def added_to(self, whole: RankMemory, model: ModelShape, copy: int, num_models: int) -> RankMemory:
        """Memory of a rank that trains the adapter of its first model and the others whole.

        Args:
            whole: its memory if it trained all of them whole.
            copy: bytes of one model.
        """
        trained = FLOAT_BYTES * self.num_parameters(model) / (num_models * copy)
        share = trained + (num_models - 1) / num_models
        return replace(
            whole,
            weights=round((1 + trained) * whole.weights),
            masters=round((num_models - 1) / num_models * whole.masters),  # the adapter is float32
            gradients=round(share * whole.gradients),
            optimizer=round(share * whole.optimizer),
            step=whole.step if num_models > 1 else round(share * whole.step),
            host_copy=round(share * whole.host_copy),
        )


def _widths(model: ModelShape) -> dict[str, int]:
    """Inputs and outputs together of each linear layer; routed experts are stored as one tensor and have no adapter."""
    h, i = model.hidden_size, model.shared_intermediate_size if model.num_experts else model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = {"q_proj": h + queries, "k_proj": h + keys, "v_proj": h + keys, "o_proj": queries + h}
    dense = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), h + i) if i else {}
    return attention | dense

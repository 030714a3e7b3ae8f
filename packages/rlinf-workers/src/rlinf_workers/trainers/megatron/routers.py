"""Router replay in megatron-core: routers that use the experts which the engine chose (models/router_replay.py).

A layer sets its router's experts before each of its passes, from the packed row that it computes: in a pipeline several
micro-batches are under way, and with recomputation the backward pass computes a layer again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rlinf_comm.weights.layouts import TransformerShape
from rlinf_workers.models.router_replay import ExpertChoice


class ReplayedRouter(TopKRouter):
    """Replaces TopKRouter in a layer spec."""

    experts: Tensor | None = None
    """[N, k] int64, of the tokens of this rank's next pass; None: its own choice."""
    shares: Tensor | None = None
    """[N], of the last pass with `experts`: the share of them that the router would have chosen, too."""

    def routing(self, logits: Tensor, *arguments: Any, **named: Any) -> Any:
        if self.experts is None:
            return super().routing(logits, *arguments, **named)
        with ExpertChoice(self.experts, self.config.num_moe_experts or 0) as choice:
            output = super().routing(logits, *arguments, **named)
        (own,) = choice.own
        self.shares = (self.experts[..., None] == own[:, None]).any(-1).float().mean(-1)
        return output


def biases_of(model: nn.Module) -> dict[str, Tensor]:
    """Name in the model -> the routers' biases for the choice of experts: buffers, which no optimizer trains."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(".expert_bias")}


def routers_of(model: nn.Module) -> list[ReplayedRouter]:
    """The routers of this rank's layers, in their order."""
    return [module for module in model.modules() if isinstance(module, ReplayedRouter)]


def replay(model: GPTModel, shape: TransformerShape, part: int, num_parts: int) -> None:
    """Makes this rank's layers use the experts of the rows that they compute.

    Args:
        shape: of the whole model.
        part: which of `num_parts` equal parts of a row the routers of this rank get (sequence parallelism).
    """
    layers: Any = model.decoder.layers
    for layer in layers:
        for router in routers_of(layer):  # at most one
            number = sum(map(shape.has_experts, range(layer.layer_number - 1)))  # layers count from 1
            layer.register_forward_pre_hook(partial(_set_experts, router, number, part, num_parts), with_kwargs=True)


def _set_experts(
    router: ReplayedRouter, number: int, part: int, num_parts: int, _: nn.Module, arguments: Any, named: dict[str, Any]
) -> None:
    """Before a layer's forward pass."""
    row = named.get("packed_seq_params")
    experts = None if row is None else row.experts
    router.experts = None if experts is None else experts[:, number].chunk(num_parts)[part].long()


def agreed(model: nn.Module, num_tokens: int) -> Tensor:
    """Sums of this rank after a pass with experts: the share of each token's that the routers would have chosen, too,
    averaged over layers; and the tokens, [2].

    Args:
        num_tokens: the first tokens of the routers' part, without the padding after them.
    """
    shares = torch.stack([router.shares for router in routers_of(model) if router.shares is not None]).mean(0)
    own = shares[:num_tokens]
    return torch.stack([own.sum(), own.new_full((), len(own))])

"""The load-balancing loss of a mixture of experts, from its router logits in a training forward pass.

transformers names the routers of an architecture (`_can_record_outputs`); hooks on them record the logits of every
call, also if a backend computes the layers in pieces or recomputes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import router_balance_loss
from rlinf_workers.models.packed import PackedBatch
from rlinf_workers.models.sequences import SequenceBatch


def has_balanced_routers(model_type: str) -> bool:
    """Whether an architecture is a mixture of experts whose routers are trained with this loss."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING and hasattr(CONFIG_MAPPING[model_type](), "router_aux_loss_coef")


def has_routers(model_type: str) -> bool:
    """Whether an architecture is a mixture of experts whose routers transformers names, as `routers_of` reads them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        kind = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(model_type))]  # pyright: ignore
    except (KeyError, ValueError):  # no causal model of transformers
        return False
    recorder = getattr(kind, "_can_record_outputs", None) or {}
    return getattr(recorder.get("router_logits"), "target_class", None) is not None


def routers_of(model: Any) -> list[Any]:
    """The routers of a mixture of experts, as transformers names them, in the order of its layers; empty for others."""
    recorder = getattr(model.base_model, "_can_record_outputs", {}).get("router_logits")
    kind = getattr(recorder, "target_class", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


@contextmanager
def recorded_routers(model: Any) -> Iterator[list[list[Tensor]]]:
    """Yields the logits [tokens, E] of each call of each router; the list of a router is filled while the model runs.

    Raises: ValueError for a model without routers.
    """
    if not (routers := routers_of(model)):
        raise ValueError(f"{type(model).__name__} has no routers; leave router_aux_coef out")
    index = getattr(model.base_model._can_record_outputs["router_logits"], "index", 0)
    by_router: list[list[Tensor]] = [[] for _ in routers]

    def hook(calls: list[Tensor]) -> Any:
        def record(module: Any, inputs: Any, output: Any) -> None:
            logits = output[index] if isinstance(output, tuple) else output
            calls.append(logits.reshape(-1, logits.shape[-1]))

        return record

    handles = [router.register_forward_hook(hook(calls)) for router, calls in zip(routers, by_router, strict=True)]
    try:
        yield by_router
    finally:
        for handle in handles:
            handle.remove()


def balance_loss(model: Any, batch: SequenceBatch | PackedBatch, routers: list[list[Tensor]]) -> Tensor:
    """`router_balance_loss` over the computed tokens of a batch: each prompt once, and its completions without the last
    token of each.

    Args:
        routers: the lists of `recorded_routers` after the forward pass.
    """
    mask = None
    if isinstance(batch, SequenceBatch):
        mask = torch.cat([batch.prompt_mask.flatten(), batch.loss_mask[:, 1:].flatten().long()])
    top_k = getattr(model.config, "num_experts_per_tok", None) or getattr(model.config, "num_experts_per_token", 2)
    logits = [torch.cat(calls) for calls in routers]
    if isinstance(batch, PackedBatch) and batch.share is not None:
        logits = [batch.share.whole(own) for own in logits]
    return router_balance_loss(logits, top_k=top_k, mask=mask)

"""Router replay (R3, arXiv:2510.11370): a mixture of experts is trained with the experts that the engine chose.

A token whose router is near a tie goes to other experts in the trainer than in the engine, and its log-probability
moves far more than rounding explains. With replay the engine records the indices that each router chose, and the
trainer's routers use them: the weights of these experts are still the trainer's own probabilities, so gradients reach
the router.

The routers of transformers (Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE, gpt-oss, DeepSeek-V3, GLM and others) are modules
that call `torch.topk` once on the scores of all experts, [N, E]. What that call returns is recorded or replaced here;
whatever a router does before and after (groups of experts, softmax, normalisation) stays its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlinf_workers.models.packed import PackedBatch
from rlinf_workers.models.routers import routers_of

_REPLAYED: ContextVar[tuple[Any, Tensor] | None] = ContextVar("model and experts of this forward pass", default=None)


class ExpertChoice(TorchFunctionMode):
    """Records what `torch.topk` chooses among the experts; replaces it by `experts`, [N, k] int64, if there are any.

    Args:
        num_experts: calls on other scores are those of groups of experts.
    """

    def __init__(self, experts: Tensor | None, num_experts: int) -> None:
        super().__init__()
        self._experts, self._num_experts = experts, num_experts
        self.own: list[Tensor] = []
        """Of each call, [N, k], as compact as the number of experts allows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[1:] != (self._num_experts,):
            return result
        self.own.append(result.indices.to(torch.uint8 if args[0].shape[-1] <= 256 else torch.int16))
        if self._experts is None:
            return result
        if self._experts.shape != result.indices.shape:
            raise RuntimeError(
                f"router replay: {tuple(self._experts.shape)} experts were recorded for {tuple(result.indices.shape)} "
                "choices of a router"
            )
        return torch.return_types.topk((args[0].gather(-1, self._experts), self._experts))


def _choose(
    forward: Callable[..., Any],
    num_experts: int,
    experts: Tensor | None,
    own: list[Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A router's forward pass; its choices are appended to `own`."""
    with ExpertChoice(experts, num_experts) as choice:
        output = forward(*args, **kwargs)
    if len(choice.own) != 1:
        raise ValueError(
            f"router replay needs routers that choose experts with one call of torch.topk, and one made "
            f"{len(choice.own)}"
        )
    own += choice.own
    return output


@contextmanager
def _choices(model: Any, experts: Sequence[Tensor] | None) -> Iterator[list[list[Tensor]]]:
    """Yields what each router chooses by itself, [N, k] for each call; `experts` has what each uses instead."""
    if not (routers := routers_of(model)):
        raise ValueError(f"{type(model).__name__} has no routers")
    if experts is not None and len(experts) != len(routers):
        raise ValueError(
            f"router replay: experts were recorded for {len(experts)} routers, and there are {len(routers)}"
        )
    by_router: list[list[Tensor]] = [[] for _ in routers]
    try:
        for number, (router, own) in enumerate(zip(routers, by_router, strict=True)):
            num_experts = next(weight.shape[0] for weight in router.parameters() if weight.ndim == 2)
            chosen = None if experts is None else experts[number]
            router.forward = partial(_choose, router.forward, num_experts, chosen, own)
        yield by_router
    finally:
        for router in routers:
            router.__dict__.pop("forward", None)


def recorded_experts(model: Any) -> AbstractContextManager[list[list[Tensor]]]:
    """Yields the experts of each call of each router, [N, k]: uint8 if there are at most 256 experts, else int16.

    Raises: ValueError for a model without routers, or with routers of another kind.
    """
    return _choices(model, None)


def experts_of_groups(
    by_router: Sequence[Sequence[Tensor]], prompt_lengths: Sequence[int], width: int, masks: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """`prompt_experts` and `experts` of each group, as in `SampleGroup`.

    Args:
        by_router: the lists of `recorded_experts`: first of the call for all prompts, left-padded to `width`; then of
            the calls for token 0, 1, ... of all completions, those of a group one after the other. Further rows at the
            end are ignored.
        prompt_lengths: of each group.
        masks: [G, T] of each group, on the CPU, 1 on sampled tokens.
    """
    prompts, *steps = (torch.stack(call, 1).cpu() for call in zip(*by_router, strict=True))  # [rows, layers, k] each
    tokens = torch.stack(steps, 1) if steps else prompts.new_zeros(sum(map(len, masks)), 0, *prompts.shape[1:])
    groups, first = [], 0
    for number, (length, mask) in enumerate(zip(prompt_lengths, masks, strict=True)):
        end = (number + 1) * width
        is_computed = mask[:, 1 : int(mask.sum(-1).max())].bool()  # the last token of a completion never is
        experts = tokens[first : first + len(mask), : is_computed.shape[1]] * is_computed[..., None, None]
        groups.append((prompts[end - length : end].clone(), experts))
        first += len(mask)
    return groups


@contextmanager
def replayed_experts(model: Any, experts: Tensor) -> Iterator[list[list[Tensor]]]:
    """Makes the routers of a model use `experts`, [N, layers, k], for the N tokens of its next forward pass. Yields the
    experts that the routers would have chosen, as `recorded_experts`."""
    token = _REPLAYED.set((model, experts))
    try:
        with _choices(model, experts.long().unbind(1)) as by_router:
            yield by_router
    finally:
        _REPLAYED.reset(token)


def recomputed_with_experts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of torch's `checkpoint(context_fn=...)`: a layer that the backward pass computes again uses the
    experts of the forward pass."""
    replayed = _REPLAYED.get()
    return nullcontext(), nullcontext() if replayed is None else replayed_experts(*replayed)


def agreement(batch: PackedBatch, by_router: Sequence[Sequence[Tensor]]) -> Tensor:
    """The share of the engine's choices that the model's own routers make, too.

    Args:
        by_router: the lists of `replayed_experts` after one forward pass of the batch.
    """
    assert batch.experts is not None, "they were replayed"
    own = torch.stack([call for (call,) in by_router], 1)  # [N, layers, k]
    shares = (batch.experts[..., None] == own[..., None, :]).any(-1).float().mean((1, 2))
    return (shares if batch.share is None else batch.share.whole(shares)).mean()

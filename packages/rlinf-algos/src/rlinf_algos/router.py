"""The load-balancing loss of a mixture of experts (Switch Transformers, arXiv:2101.03961, eq. 4 to 6), as in Hugging
Face transformers for several experts per token and several layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, at_least_float32, masked
from rlinf_algos.errors import AlgosError, ShapeError


def router_balance_loss(router_logits: Sequence[Tensor], *, top_k: int, mask: Tensor | None = None) -> Tensor:
    """`E * sum over experts of f_e P_e`: over the tokens of all layers, f_e is how often expert e was among the `top_k`
    of a token, and P_e its mean probability. The minimum is `top_k`, reached if all experts are used equally; the
    gradient passes through P.

    Args:
        router_logits: [N, E] for each layer, with gradient; N tokens, the same in all layers.
        top_k: experts per token, between 1 and E.
        mask: [N], bool or 0/1, 0 on padding; None: every token.

    Returns:
        a scalar tensor, at least float32; 0 if there is no token.

    Raises: ShapeError, NonFiniteError. AlgosError: top_k, no layer.
    """
    if not router_logits:
        raise AlgosError("router_logits has no layer; is the model a mixture of experts?")
    shape = router_logits[0].shape
    if len(shape) != 2 or any(logits.shape != shape for logits in router_logits):
        raise ShapeError(f"router_logits has the shapes {[list(one.shape) for one in router_logits]}; expected [N, E]")
    num_experts = shape[1]
    if not 1 <= top_k <= num_experts:
        raise AlgosError(f"top_k={top_k} must be between 1 and {num_experts}, the number of experts")
    inside = as_mask("mask", mask, "router_logits[0][:, 0]", router_logits[0][:, 0])
    used = mass = torch.zeros(num_experts, device=router_logits[0].device)
    for logits in router_logits:
        filled = masked("router_logits", at_least_float32(logits), inside[:, None].expand(shape))
        probabilities = filled.softmax(dim=-1) * inside[:, None]
        chosen = torch.zeros_like(probabilities).scatter_(1, filled.detach().topk(top_k, dim=-1).indices, 1.0)
        used = used + (chosen * inside[:, None]).sum(dim=0)
        mass = mass + probabilities.sum(dim=0)
    num_tokens = inside.sum().clamp(min=1) * len(router_logits)
    return num_experts * (used / num_tokens * (mass / num_tokens)).sum()

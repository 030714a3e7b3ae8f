"""Shards a module with `fully_shard`, and gathers or shards its tensors for files."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rlinf_comm.weights.layouts import shard_boxes
from rlinf_workers.models.compiled_layers import layers_of
from rlinf_workers.models.router_replay import recomputed_with_experts
from rlinf_workers.trainers.checkpoint import host_copy

T = TypeVar("T")


class Root(nn.Module):
    """Wraps a model: inside `forward`, every parameter outside of layers is gathered.

    A micro-batch passes through it once, however often it calls the model, so these parameters are gathered once.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, do: Callable[[], T]) -> T:
        return do()


def _of_another_dtype(module: nn.Module) -> list[nn.Module]:
    """Modules whose own trained parameters differ in dtype from most of those that are not sharded yet: `fully_shard`
    sums gradients of one dtype together."""
    own = {
        part: [p for p in part.parameters(recurse=False) if p.requires_grad and not isinstance(p, DTensor)]
        for part in module.modules()
    }
    sizes = Counter[torch.dtype]()
    for parameters in own.values():
        for parameter in parameters:
            sizes[parameter.dtype] += parameter.numel()
    if len(sizes) < 2:
        return []
    most = sizes.most_common(1)[0][0]
    return [part for part, parameters in own.items() if any(parameter.dtype != most for parameter in parameters)]


def shard(model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> Root:
    """Shards each layer and the rest of the model over the mesh; each rank keeps its shards on the mesh's device.

    Gradients are summed over ranks in the dtype of the parameters, whatever the compute dtype.
    """
    trained = next(p for p in model.parameters() if p.requires_grad)
    reduce_dtype = None if compute_dtype is None else trained.dtype
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=True)
    for layer in layers_of(model):
        if getattr(layer, "may_be_unread", False):
            continue  # gathering is triggered by the gradient of the output, which may be unused here
        for part in _of_another_dtype(layer):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for part in _of_another_dtype(model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    root = Root(model)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            _reduce_unused(module)
    return root


def _reduce_unused(module: FSDPModule) -> None:
    """Includes parameters in the sum over ranks even if the loss does not use them on some rank.

    torch before 2.13 has no setting for this; there, missing gradients are inserted before they are collected.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)
        return
    group: Any = module._get_fsdp_state()._fsdp_param_group  # pyright: ignore
    if group is None:  # all parameters belong to submodules
        return
    collect = group.post_backward

    def post_backward(*arguments: Any) -> None:
        for held in group.fsdp_params if group.is_unsharded else ():
            parameter = held.unsharded_param
            if parameter.requires_grad and parameter.grad is None and held.unsharded_accumulated_grad is None:
                parameter.grad = torch.zeros_like(parameter)
        collect(*arguments)

    group.post_backward = post_backward


def give_memory(model: nn.Module, shards: dict[str, Tensor | None], device: torch.device) -> None:
    """Allocates memory for the parameters of a sharded outline.

    Args:
        shards: name -> this rank's shard, whose memory the parameter takes over; None: uninitialized memory. The dict
            is consumed.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    replacements: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if parameter not in replacements:  # tied parameters stay one
                assert isinstance(parameter, DTensor), "fully_shard makes DTensors of all parameters"
                shard = shards.pop(names[parameter])
                if shard is None:
                    whole = torch.empty_like(parameter, device=device)
                else:
                    whole = on_shard(lambda _, shard=shard: shard.to(device), parameter)
                replacements[parameter] = nn.Parameter(whole, parameter.requires_grad)
            setattr(module, name, replacements[parameter])


def move(root: Root, elsewhere: Callable[[str, Tensor], Tensor]) -> None:
    """Moves this rank's shards of parameters and gradients, and the buffers; parameter objects stay the same.

    Args:
        elsewhere: maps a name and a tensor to its copy in other memory.
    """
    cast(FSDPModule, root).reshard()
    tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    tensors |= {f"gradient {name}": p.grad for name, p in root.named_parameters() if p.grad is not None}
    names = {id(tensor): name for name, tensor in tensors.items()}
    root._apply(lambda tensor: on_shard(partial(elsewhere, names[id(tensor)]), tensor))


def recompute_feed_forward(model: nn.Module) -> None:
    """Recomputes the feed-forward half of each layer in the backward pass instead of keeping its activations.

    Attention is not recomputed, because it writes keys and values into a cache, which must happen once.
    Raises: ValueError for a model whose layers have no `mlp`.
    """
    halves = [layer.mlp for layer in layers_of(model) if hasattr(layer, "mlp")]
    if not halves:
        raise ValueError(
            f"recompute=true, but {type(model).__name__} has no decoder layers with an `mlp`; leave it out"
        )
    for half in halves:
        plain: Any = half.forward  # pyright: ignore
        half.forward = partial(checkpoint, plain, use_reentrant=False, context_fn=recomputed_with_experts)  # pyright: ignore


def skeleton(model: nn.Module) -> nn.Module:
    """A copy whose parameters take no memory; buffers are real."""
    return _copy(model, lambda p: torch.empty_like(p, device="meta"))


def whole_model(bare: nn.Module) -> nn.Module:
    """A copy of a skeleton with uninitialized, untrained parameters in host memory."""
    return _copy(bare, lambda p: torch.empty_like(p, device="cpu")).requires_grad_(False)


def _copy(model: nn.Module, like: Callable[[Tensor], Tensor]) -> nn.Module:
    memo: dict[int, Any] = {id(p): nn.Parameter(like(p.detach()), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, without gradient, on its device; every rank of its mesh calls."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def gathered(tensor: Tensor, writer: int) -> Tensor | None:
    """The whole tensor in host memory on the rank `writer`, None on others; every rank of its mesh calls.

    Other ranks never hold more than their own shard.
    """
    mine = local(tensor)
    if not isinstance(tensor, DTensor):
        return host_copy(mine) if dist.get_rank() == writer else None
    mesh, (num_rows, *widths) = tensor.device_mesh, tensor.shape
    shard = mine.new_zeros(-(-num_rows // mesh.size()), *widths)  # padded to the longest shard
    shard[: len(mine)] = mine
    shards = [torch.empty_like(shard) for _ in range(mesh.size())] if mesh.get_local_rank() == writer else None
    dist.gather(shard, shards, group=mesh.get_group(), group_dst=writer)
    return None if shards is None else torch.cat(shards)[:num_rows].cpu()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, without gradient; no copy."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def on_shard(do: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Applies `do` to this rank's shard; returns the result as a shard of a tensor with the same sharding."""
    shard = do(local(tensor))
    if not isinstance(tensor, DTensor):
        return shard
    shape = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(shard, tensor.device_mesh, tensor.placements, run_check=False, **shape)


def shard_place(name: str, tensor: Tensor, rank: int, num_ranks: int) -> tuple[slice, ...]:
    """The slices of a rank's shard in the whole tensor."""
    box = shard_boxes(name, tensor, list(range(num_ranks)))[rank]
    return tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], sources: Mapping[str, Tensor], rank: int, num_ranks: int) -> None:
    """Copies into each tensor its shard of the whole tensor of the same name."""
    for name, tensor in tensors.items():
        local(tensor).copy_(sources[name][shard_place(name, tensor, rank, num_ranks)])

"""megatron-core's optimizer, and access to the masters and moments of each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.megatron.options import MegatronOptions
from rlinf_workers.trainers.megatron.storages import Storages

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(chunks: list[DistributedDataParallel], options: MegatronOptions) -> Any:
    """An optimizer that decays every parameter, as torch's AdamW does; `apply_settings` sets its values."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1.0,  # set before each step
        bf16=options.compute_dtype == "bfloat16",
        params_dtype=getattr(torch, options.compute_dtype),
        use_distributed_optimizer=options.distributed_optimizer,
    )
    return get_megatron_optimizer(settings, chunks, config_overrides={})  # pyright: ignore[reportArgumentType]


def apply_settings(optimizer: Any, settings: OptimizerSettings) -> None:
    """Clears the state and applies these settings, except the learning rate."""
    for one in optimizer.chained_optimizers:
        one.optimizer.state.clear()
        for group in one.param_groups:
            group.pop("step", None)  # kept by the fused AdamW
            group |= {
                "betas": settings.betas,
                "eps": settings.epsilon,
                "weight_decay": settings.weight_decay,
                "wd_mult": 1.0,
            }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """The share of a parameter that this rank steps."""

    master: Tensor
    """The tensor that the inner optimizer steps and keys its state by: the parameter itself, or a float32 shard of
    it."""
    optimizer: Any
    """The inner optimizer."""
    first: int
    """Offset of the master's first element in the flat parameter."""


class Masters:
    """The float32 weights and moments of an optimizer, whole and by parameter, in host memory.

    Args:
        storages: where offloaded ones are read and written.
    """

    def __init__(self, optimizer: Any, storages: Storages) -> None:
        self._here = storages.here
        self._held: dict[nn.Parameter, _Held] = {}
        self._groups: list[Any] = []
        """Ranks that shard the masters of dense parameters, and those for experts; empty if masters are not sharded."""
        for one in optimizer.chained_optimizers:
            is_shared = hasattr(one, "shard_fp32_groups")
            if is_shared:
                self._groups.append(one.data_parallel_group)
            for parameter, master in _pairs(one, is_shared):
                first = one._get_model_param_range_map(parameter)["param"].start if is_shared else 0
                self._held[parameter] = _Held(master=master, optimizer=one.optimizer, first=first)

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """If masters are sharded, all ranks that share them must call."""
        if parameter.dtype == torch.float32:
            return self._here(parameter).cpu()
        held = self._held.get(parameter)
        return self._whole(parameter, held and held.master)

    def moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        """As `weight`."""
        held = self._held.get(parameter)
        return self._whole(parameter, held and held.optimizer.state[held.master][name])

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """The parameter's, too."""
        self._here(parameter).copy_(value)
        if (held := self._held.get(parameter)) is not None and held.master.dtype != parameter.dtype:
            self._here(held.master).copy_(self._shard(held, value))

    @torch.no_grad()
    def set_moment(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """The value must be on the device of the masters."""
        if (held := self._held.get(parameter)) is not None:
            shard = self._shard(held, value).to(held.master)
            held.optimizer.state[held.master][name] = shard.clone(memory_format=torch.contiguous_format)

    def set_steps(self, count: int) -> None:
        """Sets the step count that belongs to the moments."""
        for held in self._held.values():
            held.optimizer.state[held.master]["step"] = torch.tensor(float(count))

    def _shard(self, held: _Held, value: Tensor) -> Tensor:
        return value.flatten()[held.first : held.first + held.master.numel()].view_as(held.master)

    def _whole(self, parameter: nn.Parameter, shard: Tensor | None) -> Tensor:
        if not self._groups:
            assert shard is not None, "without sharding a rank has every master"
            return self._here(shard).cpu()
        flat = torch.zeros(parameter.numel(), dtype=torch.float32)
        if shard is not None:
            first = self._held[parameter].first
            flat[first : first + shard.numel()] = self._here(shard).flatten()
        is_expert = not getattr(parameter, "allreduce", True)
        dist.all_reduce(flat.view(torch.uint8), group=self._groups[is_expert])  # as bytes, to preserve -0.0
        return flat.view(parameter.shape)


def _pairs(one: Any, is_shared: bool) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The parameters of one of megatron-core's three kinds of optimizer, with the tensors it steps."""
    if is_shared:
        names = [("model_float16_groups", "shard_fp32_from_float16_groups"), ("model_fp32_groups", "shard_fp32_groups")]
    elif hasattr(one, "fp32_from_float16_groups"):
        names = [("float16_groups", "fp32_from_float16_groups"), ("fp32_from_fp32_groups", "fp32_from_fp32_groups")]
    else:
        for parameter in one.get_parameters():
            yield parameter, parameter
        return
    for ours, theirs in names:
        for parameters, masters in zip(getattr(one, ours), getattr(one, theirs), strict=True):
            yield from zip(parameters, masters, strict=True)

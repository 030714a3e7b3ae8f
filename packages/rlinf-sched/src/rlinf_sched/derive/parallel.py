"""Losses from computing on several devices: uneven shares of a mini-batch, pipeline bubbles, gradient reduction, token
exchange between experts.

Devices of an instance lie beside each other, and so do instances; a node has `GPUS_PER_NODE` of them. Nothing here
overlaps with arithmetic.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

from rlinf_sched.derive.datasheets import GPUS_PER_NODE, Gpu
from rlinf_sched.derive.shapes import BYTES_PER_PARAMETER, ModelShape
from rlinf_sched.profile import ItemCosts

NODE_LINK_SHARE = 0.95
"""Share of NVLink's rate that an exchange reaches: 153 of 160 GB/s between the 8 H800 of a node (DeepEP, README of
version 1, normal kernels)."""
NETWORK_SHARE = 0.86
"""Share of the network port's rate that an exchange reaches: 43 of 50 GB/s between 16 H800 (the same table)."""
GRADIENT_BYTES_PER_PARAMETER = 4
"""Gradients are fp32, as Megatron's distributed optimizer and FSDP with fp32 reduction keep them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceLayout:
    """How the devices of one instance share a model."""

    width: int
    """Devices that share each layer: by tensor parallelism, or each with some of the experts."""
    num_stages: int
    """Stages of consecutive layers, a pipeline."""
    num_chunks: int = 1
    """Chunks of layers of each stage, through which a micro-batch passes in turn (interleaved 1F1B)."""

    @property
    def num_devices(self) -> int:
        return self.width * self.num_stages

    def largest_share(self, num_layers: int) -> float:
        """Layers of the stage that has most of them, over the mean: the others wait for it. At least 1."""
        return math.ceil(num_layers / self.num_stages) * self.num_stages / num_layers


def layouts(model: ModelShape, num_devices: int) -> Iterator[InstanceLayout]:
    """The ways in which so many devices, a power of two, can share a model. Tensor parallelism stays within a node;
    experts may be dealt out over several. Some stages may have a layer more than others."""
    for width in (1 << k for k in range(num_devices.bit_length())):
        num_stages = num_devices // width
        divides = model.num_experts % width == 0 if model.num_experts else model.num_kv_heads % width == 0
        is_near = bool(model.num_experts) or width <= GPUS_PER_NODE
        if divides and is_near and num_stages <= model.num_layers:
            yield InstanceLayout(width=width, num_stages=num_stages)


def shared_layer_s(model: ModelShape, gpu: Gpu, width: int, *, passes: int) -> float:
    """Seconds of communication per token of the instance for devices that share each layer, with `passes` per layer: an
    all-reduce of its hidden state, or, if each device has its own tokens, sending them to their experts."""
    if model.num_experts:
        return exchange_s(model, gpu, width, passes=passes) / width
    moved = 2 * (width - 1) / width * BYTES_PER_PARAMETER * model.hidden_size
    return passes * model.num_layers * moved / (NODE_LINK_SHARE * gpu.node_bytes_per_s)


def exchange_s(model: ModelShape, gpu: Gpu, width: int, *, passes: int) -> float:
    """Seconds of a device for one of its own tokens, whose hidden state goes to each of its experts, or comes back,
    `passes` times a layer.

    Experts are chosen evenly, so each of `width` devices has as many; those of the node are reached by its links at the
    same time as the others by the network (all-to-all; a token with two experts on a device is sent there twice).
    """
    near = min(width, GPUS_PER_NODE)
    sent = passes * model.num_layers * model.num_active_experts * BYTES_PER_PARAMETER * model.hidden_size
    in_node_s = sent * (near - 1) / width / (NODE_LINK_SHARE * gpu.node_bytes_per_s)
    between_s = sent * (width - near) / width / (NETWORK_SHARE * gpu.network_bytes_per_s)
    return max(in_node_s, between_s)


def ring_bytes_per_s(gpu: Gpu, instance_devices: int, num_ranks: int) -> float:
    """Bytes that each device takes in a second in a reduction over the instances. A ring leaves its node through the
    ports of those of the node's devices that are in it."""
    in_node = NODE_LINK_SHARE * gpu.node_bytes_per_s
    if instance_devices * num_ranks <= GPUS_PER_NODE:
        return in_node
    ports = max(1, GPUS_PER_NODE // instance_devices)
    return min(in_node, ports * NETWORK_SHARE * gpu.network_bytes_per_s)


def reduction_s(model: ModelShape, gpu: Gpu, instance_devices: int, num_ranks: int) -> float:
    """Seconds of one optimizer step to scatter the sums of gradients over the instances and to gather the weights."""
    num_bytes = (GRADIENT_BYTES_PER_PARAMETER + BYTES_PER_PARAMETER) * model.num_parameters / instance_devices
    return num_bytes * (num_ranks - 1) / num_ranks / ring_bytes_per_s(gpu, instance_devices, num_ranks)


def bubble_s(layout: InstanceLayout, micro_batch_s: float) -> float:
    """Seconds of one optimizer step in which a stage of the pipeline has nothing to do.

    Micro-batches that take as long on each stage, but differ among themselves, are through after the sum of all and
    the longest once more for each further stage (a proportionate flow shop: Pinedo, Scheduling, section 6.1). With
    several chunks a stage waits for passes of one of them alone (arXiv:2104.04473, section 2.2).

    Args:
        micro_batch_s: seconds of the longest micro-batch on one stage.
    """
    return (layout.num_stages - 1) * micro_batch_s / layout.num_chunks


def longest_share(costs: ItemCosts, items_per_minibatch: float, num_ranks: int) -> float:
    """The work of the rank that has most of a mini-batch, over the mean: all wait for it.

    Ranks get as many items each, whatever they cost (`enable_dp_load_balance: False` in RLinf's public recipes of
    reasoning). Their sums are taken as lognormal; the largest of n is expected at the quantile (n - 3/8) / (n + 1/4)
    (Blom, Statistical estimates and transformed beta-variables, 1958).
    """
    if num_ranks == 1:
        return 1.0
    variance = float(costs.quantiles(1024).var()) * num_ranks / items_per_minibatch
    sigma = math.sqrt(math.log1p(variance))
    largest = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    return math.exp(sigma * largest - sigma**2 / 2)

"""Profiles of training, of log-probabilities and of values: arithmetic at a public utilisation, memory by bytes per
parameter, and the losses of `parallel`.

A hand-over is trained in micro-batches of packed sequences, so activations do not grow with its items.
"""

import itertools
from typing import Any, Literal

from rlinf_sched.derive.datasheets import Gpu
from rlinf_sched.derive.lengths import Lengths
from rlinf_sched.derive.parallel import (
    GRADIENT_BYTES_PER_PARAMETER,
    InstanceLayout,
    bubble_s,
    layouts,
    longest_share,
    reduction_s,
    ring_bytes_per_s,
    shared_layer_s,
)
from rlinf_sched.derive.shapes import BYTES_PER_PARAMETER, ModelShape
from rlinf_sched.profile import InstanceProfile, ItemCosts, StageProfile, TimePoint

Sharding = Literal["data", "model"]

DENSE_UTILISATION = 0.40
"""Share of the peak arithmetic that training a dense model reaches: 0.38 to 0.43 on H100 (Llama 3, arXiv:2407.21783,
table 4). Forward passes are taken to reach the same."""
MOE_UTILISATION = 0.33
"""The same for small experts, without the exchange of tokens between them: Qwen3 MoE 30B trains 12,040 tokens/s on each
of the 8 H100 of a node with sequences of 4,096 (NeMo AutoModel, performance summary), of which the exchange of
`parallel` is 13 us a token."""
ADAM_BYTES_PER_PARAMETER = 12
"""Bytes of the fp32 master weight and two moments (ZeRO, arXiv:1910.02054, section 3.1)."""
LOGIT_BYTES = 8
"""Bytes for each token and word of the vocabulary: the fp32 logit and its gradient."""
LAYER_ACTIVATION_BYTES = 34
"""Bytes for each token and unit of hidden size in the layer that is recomputed (arXiv:2205.05198, equation 2, without
the attention scores, which flash attention does not keep)."""
NUM_MINIBATCHES = 4
"""Optimizer steps for each batch in public recipes of reasoning RL."""
PARALLEL_SIZES = (1, 2, 4, 8, 16, 32)
NUMBERS_OF_RANKS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of instances that a trainer's times are listed for; a plan takes the nearest by ratio."""
_ITEM_BYTES_PER_TOKEN = 24
"""Bytes of token ids, mask, log-probabilities and advantages on the device."""


def utilisation(model: ModelShape) -> float:
    """Share of the peak arithmetic that training the model reaches."""
    return MOE_UTILISATION if model.num_experts else DENSE_UTILISATION


def train_profile(
    model: ModelShape,
    gpu: Gpu,
    *,
    item_tokens: float,
    context_tokens: float,
    micro_batch_tokens: int,
    max_items: int,
    costs: ItemCosts | None = None,
    sharding: Sharding = "model",
    num_minibatches: int = NUM_MINIBATCHES,
    extra_item_flops: float = 0.0,
    frozen_item_flops: float = 0.0,
) -> StageProfile:
    """The profile of full-parameter training with Adam in bf16, with every layer recomputed.

    Args:
        item_tokens: mean number of tokens of an item.
        context_tokens: mean number of tokens that a token attends to.
        micro_batch_tokens: tokens in one forward and backward pass; at least those of the longest sequence.
        max_items: the largest hand-over in the table.
        extra_item_flops: operations of an item's forward pass beside the decoder's tokens (images).
        frozen_item_flops: operations of an item's forward pass through what is not trained.
    """
    forward = item_tokens * model.forward_flops(context_tokens) + extra_item_flops
    item_flops = frozen_item_flops + 4 * forward  # forward, backward (twice), forward again
    costs = costs or ItemCosts()
    minibatch_items = max_items / num_minibatches
    is_sharded = sharding == "data"
    shared = (GRADIENT_BYTES_PER_PARAMETER if is_sharded else 0) + ADAM_BYTES_PER_PARAMETER
    whole = 0 if is_sharded else BYTES_PER_PARAMETER + GRADIENT_BYTES_PER_PARAMETER  # on each data rank
    gathered = 2 * model.weights_bytes // model.num_layers if is_sharded else 0
    instances = []
    for size, num_ranks in itertools.product(_sizes(model, sharding), NUMBERS_OF_RANKS):
        uneven = longest_share(costs, minibatch_items, num_ranks)
        most = uneven * minibatch_items / num_ranks
        layout, item_s, step_s = _trained(model, gpu, size, item_flops, item_tokens, micro_batch_tokens, most)
        largest = layout.largest_share(model.num_layers)
        gather_s = 0.0
        if is_sharded:
            # weights gathered forward and backward, gradients scattered, once for each micro-batch, overlapped
            moved = 3 * model.weights_bytes * (num_ranks - 1) / num_ranks
            gather_s = item_tokens / micro_batch_tokens * moved / ring_bytes_per_s(gpu, size, num_ranks)
        else:
            step_s += reduction_s(model, gpu, size, num_ranks)
        instances.append(
            InstanceProfile(
                num_devices=size,
                num_ranks=num_ranks,
                points=_points(uneven * item_s, gather_s, max_items),
                step_s=num_minibatches * step_s,
                state_bytes=round(largest * whole * model.num_parameters / size),
                sharded_state_bytes=round(largest * shared * model.num_parameters),
                work_bytes=gathered + _activation_bytes(model, micro_batch_tokens, training=True) // size,
                item_work_bytes=round(_ITEM_BYTES_PER_TOKEN * item_tokens),
            )
        )
    return StageProfile(
        instances=tuple(instances),
        batching="sum",
        costs=costs,
        weights_bytes=model.weights_bytes,
        source=f"derived: training of {model.name} on {gpu.name} at {utilisation(model):.0%} of peak",
    )


def forward_profile(
    model: ModelShape,
    gpu: Gpu,
    *,
    item_tokens: float,
    context_tokens: float,
    micro_batch_tokens: int,
    max_items: int,
    costs: ItemCosts | None = None,
) -> StageProfile:
    """The profile of one forward pass over whole sequences: log-probabilities of a reference, values of a critic."""
    instances = []
    for size in _sizes(model, "model"):
        flops = item_tokens * model.forward_flops(context_tokens)
        layout, item_s = min(
            ((layout, _item_s(model, gpu, layout, flops, item_tokens, passes=2)) for layout in layouts(model, size)),
            key=lambda both: both[1],
        )
        instances.append(
            InstanceProfile(
                num_devices=size,
                points=_points(item_s, 0.0, max_items),
                state_bytes=round(layout.largest_share(model.num_layers) * model.weights_bytes / size),
                work_bytes=_activation_bytes(model, micro_batch_tokens, training=False) // size,
                item_work_bytes=round(_ITEM_BYTES_PER_TOKEN * item_tokens),
                offload_s=0.0,  # weights do not change, and the host keeps its copy
            )
        )
    return StageProfile(
        instances=tuple(instances),
        batching="sum",
        costs=costs or ItemCosts(),
        weights_bytes=model.weights_bytes,
        source=f"derived: forward pass of {model.name} on {gpu.name} at {utilisation(model):.0%} of peak",
    )


def sequence_arguments(lengths: Lengths, *, max_items: int) -> dict[str, Any]:
    """The arguments that describe groups of answers to `train_profile` and `forward_profile`."""
    return {
        "item_tokens": lengths.group_tokens,
        "context_tokens": lengths.mean_context_tokens,
        "micro_batch_tokens": lengths.prompt_tokens + lengths.limit_tokens,
        "max_items": max_items,
        "costs": lengths.total_costs,
    }


def powers_up_to(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest` itself."""
    return [1 << k for k in range(largest.bit_length()) if 1 << k < largest] + [largest]


def _sizes(model: ModelShape, sharding: Sharding) -> tuple[int, ...]:
    """Devices that one copy of the model may span: FSDP shards over the data ranks instead."""
    return (1,) if sharding == "data" else tuple(size for size in PARALLEL_SIZES if any(layouts(model, size)))


def _trained(
    model: ModelShape,
    gpu: Gpu,
    size: int,
    item_flops: float,
    item_tokens: float,
    micro_batch_tokens: int,
    num_items: float,
) -> tuple[InstanceLayout, float, float]:
    """The layout that trains `num_items` fastest, with seconds of an item, and those of a mini-batch's bubble."""

    def timed(layout: InstanceLayout) -> tuple[InstanceLayout, float, float]:
        item_s = _item_s(model, gpu, layout, item_flops, item_tokens, passes=6)
        return layout, item_s, bubble_s(layout, micro_batch_tokens / item_tokens * item_s)

    return min(map(timed, layouts(model, size)), key=lambda three: num_items * three[1] + three[2])


def _item_s(
    model: ModelShape, gpu: Gpu, layout: InstanceLayout, item_flops: float, item_tokens: float, *, passes: int
) -> float:
    """Seconds of an item on the slowest stage of an instance: its arithmetic, and `passes` exchanges between the
    devices in each layer."""
    arithmetic_s = item_flops / (layout.num_devices * utilisation(model) * gpu.flops_per_s)
    exchange_s = item_tokens * shared_layer_s(model, gpu, layout.width, passes=passes) / layout.num_stages
    return layout.largest_share(model.num_layers) * (arithmetic_s + exchange_s)


def _points(item_s: float, other_item_s: float, max_items: int) -> tuple[TimePoint, ...]:
    """Time is proportional to items; two overlapped costs take the longer one."""
    return tuple(TimePoint(num_items=n, seconds=n * max(item_s, other_item_s)) for n in powers_up_to(max_items))


def _activation_bytes(model: ModelShape, tokens: int, *, training: bool) -> int:
    """Bytes of activations of one micro-batch: the inputs of all layers while training, the inside of one layer, and
    the logits."""
    layer_inputs = BYTES_PER_PARAMETER * model.hidden_size * (model.num_layers if training else 2)
    inside = LAYER_ACTIVATION_BYTES * model.hidden_size
    logits = (LOGIT_BYTES if training else LOGIT_BYTES // 2) * model.vocab_size
    return tokens * (layer_inputs + inside + logits)

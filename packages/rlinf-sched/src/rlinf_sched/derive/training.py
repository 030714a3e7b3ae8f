"""Profiles of training, of log-probabilities and of values: arithmetic at a public utilisation, memory by bytes per
parameter, communication by datasheet.

A hand-over is trained in micro-batches of packed sequences, so activations do not grow with its items. Pipeline bubbles
and the unequal work of data-parallel ranks within one mini-batch are left out.
"""

from typing import Literal

from rlinf_sched.derive.datasheets import Gpu
from rlinf_sched.derive.lengths import Lengths
from rlinf_sched.derive.shapes import BYTES_PER_PARAMETER, ModelShape
from rlinf_sched.profile import InstanceProfile, ItemCosts, StageProfile, TimePoint

Backend = Literal["fsdp", "megatron"]

DENSE_UTILISATION = 0.40
"""Share of the peak arithmetic that training a dense model reaches: 0.38 to 0.43 on H100 (Llama 3, arXiv:2407.21783,
table 4). Forward passes are taken to reach the same."""
MOE_UTILISATION = 0.214
"""The same for small experts: 212 TFLOP/s per H100 for Qwen3 MoE 30B (NeMo AutoModel, performance highlights), which
includes the exchange of tokens between experts."""
ADAM_BYTES_PER_PARAMETER = 12
"""Bytes of the fp32 master weight and two moments (ZeRO, arXiv:1910.02054, section 3.1)."""
GRADIENT_BYTES_PER_PARAMETER = 4
"""Gradients are fp32, as Megatron's distributed optimizer and FSDP with fp32 reduction keep them."""
LOGIT_BYTES = 8
"""Bytes for each token and word of the vocabulary: the fp32 logit and its gradient."""
LAYER_ACTIVATION_BYTES = 34
"""Bytes for each token and unit of hidden size in the layer that is recomputed (arXiv:2205.05198, equation 2, without
the attention scores, which flash attention does not keep)."""
NUM_MINIBATCHES = 4
"""Optimizer steps for each batch in public recipes of reasoning RL."""
PARALLEL_SIZES = (1, 2, 4, 8, 16, 32)
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
    backend: Backend = "megatron",
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
    instances = []
    for size in _sizes(model, backend):
        rate = size * utilisation(model) * gpu.flops_per_s
        compute_s = item_flops / rate + item_tokens * _tensor_parallel_s(model, gpu, size, passes=6)
        sharded = GRADIENT_BYTES_PER_PARAMETER + ADAM_BYTES_PER_PARAMETER
        state, step_s, gather_s, gathered = 0, 0.0, 0.0, 0
        if backend == "megatron":
            # weights and gradients whole on each data rank; the optimizer's state sharded over all devices
            state = (BYTES_PER_PARAMETER + GRADIENT_BYTES_PER_PARAMETER) * model.num_parameters // size
            sharded = ADAM_BYTES_PER_PARAMETER
            step_s = num_minibatches * state / gpu.network_bytes_per_s  # reduce-scatter gradients, all-gather weights
        else:
            # weights gathered forward and backward, gradients scattered, once for each micro-batch, overlapped
            gather_s = 3 * model.weights_bytes / gpu.network_bytes_per_s
            gathered = 2 * model.weights_bytes // model.num_layers
        instances.append(
            InstanceProfile(
                num_devices=size,
                points=_points(compute_s, item_tokens / micro_batch_tokens * gather_s, max_items),
                step_s=step_s,
                state_bytes=state,
                sharded_state_bytes=sharded * model.num_parameters,
                work_bytes=gathered + _activation_bytes(model, micro_batch_tokens, training=True) // size,
                item_work_bytes=round(_ITEM_BYTES_PER_TOKEN * item_tokens),
            )
        )
    return StageProfile(
        instances=tuple(instances),
        batching="sum",
        costs=costs or ItemCosts(),
        weights_bytes=model.weights_bytes,
        source=f"derived: {backend} training of {model.name} on {gpu.name} at {utilisation(model):.0%} of peak",
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
    for size in _sizes(model, "megatron"):
        rate = size * utilisation(model) * gpu.flops_per_s
        item_s = item_tokens * (
            model.forward_flops(context_tokens) / rate + _tensor_parallel_s(model, gpu, size, passes=2)
        )
        instances.append(
            InstanceProfile(
                num_devices=size,
                points=_points(item_s, 0.0, max_items),
                state_bytes=model.weights_bytes // size,
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


def sequence_arguments(lengths: Lengths, *, max_items: int) -> dict:
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


def _sizes(model: ModelShape, backend: Backend) -> tuple[int, ...]:
    """Devices that one copy of the model may span: FSDP shards over the data ranks instead."""
    if backend == "fsdp":
        return (1,)
    return PARALLEL_SIZES if model.num_experts else tuple(s for s in PARALLEL_SIZES[:4] if model.num_kv_heads % s == 0)


def _points(item_s: float, other_item_s: float, max_items: int) -> tuple[TimePoint, ...]:
    """Time is proportional to items; two overlapped costs take the longer one."""
    return tuple(TimePoint(num_items=n, seconds=n * max(item_s, other_item_s)) for n in powers_up_to(max_items))


def _activation_bytes(model: ModelShape, tokens: int, *, training: bool) -> int:
    """Bytes of activations of one micro-batch: the inputs of all layers while training, the inside of one layer, and
    the logits."""
    kept = BYTES_PER_PARAMETER * model.hidden_size * (model.num_layers if training else 2)
    inside = LAYER_ACTIVATION_BYTES * model.hidden_size
    logits = (LOGIT_BYTES if training else LOGIT_BYTES // 2) * model.vocab_size
    return tokens * (kept + inside + logits)


def _tensor_parallel_s(model: ModelShape, gpu: Gpu, size: int, *, passes: int) -> float:
    """Seconds of communication for one token: `passes` all-reduces of its hidden state in each layer. 0 for experts,
    which exchange tokens instead; their utilisation includes that."""
    if size == 1 or model.num_experts:
        return 0.0
    moved = 2 * (size - 1) / size * BYTES_PER_PARAMETER * model.hidden_size
    return passes * model.num_layers * moved / gpu.node_bytes_per_s

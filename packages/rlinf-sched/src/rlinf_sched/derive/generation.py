"""Profiles of generation with continuous batching, and of policies that act on images.

A decode step reads the weights once and every running sequence's keys and values, or computes their arithmetic,
whichever takes longer. An item of generation is a prompt's group: it stays until its longest completion ends, while
fewer and fewer of its sequences run; their mean number over that time is used.
"""

from collections.abc import Callable
from typing import Literal

from rlinf_sched.derive.datasheets import Gpu
from rlinf_sched.derive.lengths import Lengths
from rlinf_sched.derive.shapes import BYTES_PER_PARAMETER, ModelShape
from rlinf_sched.derive.training import PARALLEL_SIZES, powers_up_to, utilisation
from rlinf_sched.errors import ProfileError
from rlinf_sched.profile import InstanceProfile, StageProfile, TimePoint

Engine = Literal["graphs", "eager"]

BANDWIDTH_UTILISATION = 0.72
"""Share of the memory's peak rate that decoding reaches with captured graphs: 104.9 tokens/s of Llama-2-7B in bf16 on
one A100 (PyTorch blog, "Accelerating Generative AI with PyTorch II: GPT, Fast")."""
EAGER_LAYER_S = 0.6e-3
"""Seconds that one layer takes in eager PyTorch, whatever the batch: 0.59 ms for 1 and 0.57 ms for 16 sequences of
Llama-2-7B on an H100 with transformers 5 (benchmarks/sched/gpu_constants.py). In 2023 it was 1.2 ms beside an A100:
25.5 tokens/s through the same 32 layers before compilation (same blog)."""
GRAPH_LAYER_S = 20e-6
"""Least seconds of one layer in a captured graph: about ten dependent kernels of 2 us. An assumption."""
CAPTURED_LAYER_S = 125e-6
"""Seconds of the small kernels of one layer of a transformers model in a captured graph, some forty, whatever the
batch: a token of 8 rows takes 3.0 ms in the 24 layers of Qwen2.5-0.5B's shape on an H100."""
ALL_REDUCE_S = 10e-6
"""Seconds of one small all-reduce over NVLink. An assumption: what one-shot kernels of public engines take."""
ENGINE_MEMORY_SHARE = 0.9
"""Share of the device's memory that the engine fills (vLLM's default gpu_memory_utilization)."""
MAX_RUNNING_SEQUENCES = 256
"""Most sequences in one engine at once (vLLM's default max_num_seqs on most devices, and the largest batch for which it
captures a graph by default)."""


FLOAT32_RATE = 1 / 16
"""Peak rate in float32, outside the tensor cores, over that in bf16: 19.5 of 312 TFLOP/s (A100 datasheet), 67 of 989
(H100)."""
FLOAT32_UTILISATION = 0.6
"""Share of it that is reached: 0.45 in decoding 256 sequences and 0.76 in training Qwen2.5-0.5B on an H100
(benchmarks/sched/gpu_steps.py)."""


def flops_per_s(model: ModelShape, gpu: Gpu, dtype_bytes: int = BYTES_PER_PARAMETER) -> float:
    """Arithmetic rate of the model for numbers of this many bytes."""
    if dtype_bytes > BYTES_PER_PARAMETER:
        return FLOAT32_UTILISATION * FLOAT32_RATE * gpu.flops_per_s
    return utilisation(model) * gpu.flops_per_s


def decode_step_s(
    model: ModelShape,
    gpu: Gpu,
    *,
    num_sequences: float,
    context_tokens: float,
    num_caches: float | None = None,
    num_devices: int = 1,
    engine: Engine = "graphs",
    dtype_bytes: int = BYTES_PER_PARAMETER,
) -> float:
    """Seconds to generate one more token for each of `num_sequences`, with a model split over `num_devices` by tensor
    parallelism.

    Args:
        num_caches: number of distinct contexts, if several sequences share one; None: each has its own.
    """
    idle_share = (1 - model.num_active_experts / model.num_experts) ** num_sequences if model.num_experts else 0.0
    looked_up = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    read = model.num_parameters - model.vision_parameters - looked_up - idle_share * model.num_expert_parameters
    width = dtype_bytes / BYTES_PER_PARAMETER
    num_caches = num_sequences if num_caches is None else num_caches
    num_bytes = dtype_bytes * read + width * num_caches * context_tokens * model.kv_bytes_per_token
    memory_s = num_bytes / (BANDWIDTH_UTILISATION * gpu.memory_bytes_per_s)
    compute_s = num_sequences * model.forward_flops(context_tokens) / flops_per_s(model, gpu, dtype_bytes)
    floor_s = model.num_layers * (EAGER_LAYER_S if engine == "eager" else GRAPH_LAYER_S)
    busy_s = max(memory_s / num_devices, compute_s / num_devices, floor_s)
    return busy_s + _all_reduce_s(model, gpu, num_sequences, num_devices)


def generate_profile(
    model: ModelShape,
    gpu: Gpu,
    lengths: Lengths,
    *,
    max_items: int,
    max_running_sequences: int = MAX_RUNNING_SEQUENCES,
) -> StageProfile:
    """The profile of an engine with continuous batching and a paged KV cache; a group's prompt is prefilled once.

    Args:
        max_items: number of groups in a step; no engine runs more at once.

    Raises:
        ProfileError: one group alone fits no engine at any parallel size.
    """
    group_kv = model.kv_bytes_per_token * group_cache_tokens(lengths)
    instances = []
    for size in _engine_sizes(model):
        room = ENGINE_MEMORY_SHARE * gpu.memory_bytes - model.weights_bytes / size
        fit = int(room // (group_kv / size))
        most = min(max_items, fit, max(1, max_running_sequences // lengths.group_size))
        if most < 1:
            continue
        instances.append(
            InstanceProfile(
                num_devices=size,
                points=continuous_points(model, gpu, lengths, most=most, num_devices=size),
                max_items=most,
                state_bytes=model.weights_bytes // size,
                item_work_bytes=round(group_kv / size),
                offload_s=0.0,  # the cache is dropped and the next weights come with the sync
            )
        )
    if not instances:
        raise ProfileError(
            f"{model.name} with {group_kv / 1e9:.1f} GB of KV cache for one group of {lengths.group_size} fits no "
            f"engine of up to {_engine_sizes(model)[-1]} {gpu.name}; use a smaller group, shorter answers or a larger "
            "GPU"
        )
    return StageProfile(
        instances=tuple(instances),
        batching="continuous",
        costs=lengths.longest_costs,
        weights_bytes=model.weights_bytes,
        source=f"derived: decoding {model.name} on {gpu.name} at {BANDWIDTH_UTILISATION:.0%} of its memory's rate",
    )


def group_cache_tokens(lengths: Lengths) -> float:
    """Tokens of a group in the cache of an engine: its prompt once, and the mean length so far of its running
    completions."""
    running = lengths.group_size * lengths.mean_tokens / lengths.longest_of_group_tokens
    return lengths.prompt_tokens + running * min(lengths.limit_tokens, 2 * _answer_so_far(lengths))


def continuous_points(
    model: ModelShape,
    gpu: Gpu,
    lengths: Lengths,
    *,
    most: int,
    num_devices: int,
    dtype_bytes: int = BYTES_PER_PARAMETER,
) -> tuple[TimePoint, ...]:
    """The time of groups in an engine with continuous batching, of which it runs at most `most` at once."""
    running = lengths.group_size * lengths.mean_tokens / lengths.longest_of_group_tokens
    prefill_s = read_s(model, gpu, lengths, dtype_bytes) / num_devices

    def inside_s(num_sequences: float) -> float:
        step_s = decode_step_s(
            model,
            gpu,
            num_sequences=num_sequences,
            context_tokens=lengths.mean_context_tokens,
            num_devices=num_devices,
            dtype_bytes=dtype_bytes,
        )
        return lengths.longest_sampled_tokens * step_s

    points = []
    for n in powers_up_to(most):
        seconds = n * prefill_s + with_waits(lambda share, n=n: inside_s(n * running * share), lengths)
        points.append(TimePoint(num_items=n, seconds=seconds))
    return tuple(points)


def read_s(model: ModelShape, gpu: Gpu, lengths: Lengths, dtype_bytes: int = BYTES_PER_PARAMETER) -> float:
    """Device-seconds to read the prompt of a group, and what its episodes read after it."""
    later = lengths.read_tokens - lengths.prompt_tokens
    flops = lengths.prompt_tokens * model.forward_flops(lengths.prompt_tokens / 2)
    flops += later * model.forward_flops(lengths.mean_context_tokens)
    return flops / flops_per_s(model, gpu, dtype_bytes)


def with_waits(inside_s: Callable[[float], float], lengths: Lengths) -> float:
    """Seconds of a group in an engine and in tools: a wait is added to its episode, and leaves the engine to others.

    Args:
        inside_s: maps the share of the running episodes that are in the engine at a time to the seconds in it.
    """
    outside_s, whole_s = lengths.longest_outside_s, inside_s(1.0)
    if not outside_s:
        return whole_s
    return inside_s(whole_s / (whole_s + outside_s)) + outside_s


def act_profile(
    model: ModelShape,
    gpu: Gpu,
    *,
    text_tokens: int,
    decode_tokens: int,
    parallel_tokens: int = 0,
    denoising_steps: int = 0,
    num_cameras: int = 1,
    num_rounds: int,
    max_items: int,
    engine: Engine = "eager",
) -> StageProfile:
    """The profile of a vision-language-action policy that computes one action chunk per observation of an item.

    Args:
        text_tokens: tokens of the instruction.
        decode_tokens: tokens generated one after the other; the first comes out of the prefill.
        parallel_tokens: actions that come out at once: as tokens of the prefill (OpenVLA-OFT), or of each denoising
            step, which are the model's expert's (pi0).
        denoising_steps: forward passes of the expert; 0 for a model without one.
        num_cameras: images of an observation.
        num_rounds: observations of an item in a step.
        max_items: the most observations in one hand-over.
    """
    tokens = num_cameras * model.num_patches + text_tokens + (0 if model.expert else parallel_tokens)
    forward_flops = tokens * model.forward_flops(tokens / 2) + num_cameras * model.vision_flops
    layer_s = EAGER_LAYER_S if engine == "eager" else GRAPH_LAYER_S
    read = model.weights_bytes - (model.expert.weights_bytes if model.expert else 0)
    points = []
    for n in powers_up_to(max_items):
        read_s = read / (BANDWIDTH_UTILISATION * gpu.memory_bytes_per_s)
        prefill_s = max(n * forward_flops / flops_per_s(model, gpu), read_s, model.num_layers * layer_s)
        seconds = prefill_s
        if decode_tokens > 1:
            step_s = decode_step_s(model, gpu, num_sequences=n, context_tokens=tokens, engine=engine)
            seconds += (decode_tokens - 1) * step_s
        if model.expert:
            step_s = decode_step_s(
                model.expert,
                gpu,
                num_sequences=n * parallel_tokens,
                context_tokens=tokens,
                num_caches=n,
                engine=engine,
            )
            seconds += denoising_steps * step_s
        points.append(TimePoint(num_items=n, seconds=seconds))
    instance = InstanceProfile(
        points=tuple(points),
        state_bytes=model.weights_bytes,
        item_work_bytes=(tokens + decode_tokens) * model.kv_bytes_per_token,
    )
    return StageProfile(
        instances=(instance,),
        batching="sum",
        rounds=num_rounds,
        weights_bytes=model.weights_bytes,
        source=f"derived: {model.name} acting on {gpu.name}, {engine}",
    )


def _engine_sizes(model: ModelShape) -> tuple[int, ...]:
    return tuple(size for size in PARALLEL_SIZES[:4] if model.num_kv_heads % size == 0)


def _answer_so_far(lengths: Lengths) -> float:
    """Mean number of tokens that a running answer has so far."""
    return lengths.mean_context_tokens - lengths.prompt_tokens


def _all_reduce_s(model: ModelShape, gpu: Gpu, num_sequences: float, size: int) -> float:
    """Seconds of two all-reduces of the hidden states in each layer."""
    if size == 1:
        return 0.0
    moved = 2 * (size - 1) / size * BYTES_PER_PARAMETER * model.hidden_size * num_sequences
    return 2 * model.num_layers * (ALL_REDUCE_S + moved / gpu.node_bytes_per_s)

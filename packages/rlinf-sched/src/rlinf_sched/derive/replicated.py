"""Profiles of the system that holds a whole copy of the model on every rank: data-parallel AdamW, and generation by a
plain forward loop with a static batch. The ranks that train may hold one copy together instead (FSDP2).

Memory is counted from what the code keeps, at the longest sequences that a recipe allows: weights, one gradient buffer
for each shard of the batch, two moments, and what autograd holds: tensors of a decoder layer of the Llama family, and
gradients of weights that are used twice. Where ranks hold a copy together, each has its part of these, and what a pass
has gathered.
Times are arithmetic at a public utilisation, as in `training` and `generation`.
"""

from dataclasses import dataclass, replace

from rlinf_sched.derive.datasheets import Gpu
from rlinf_sched.derive.generation import BANDWIDTH_UTILISATION, EAGER_LAYER_S
from rlinf_sched.derive.lengths import Lengths
from rlinf_sched.derive.profiles import RULE_REWARD_S, host_profile
from rlinf_sched.derive.shapes import BYTES_PER_PARAMETER, ModelShape
from rlinf_sched.derive.training import powers_up_to, utilisation
from rlinf_sched.errors import ProfileError
from rlinf_sched.flow_graph import FlowGraph, Stage
from rlinf_sched.profile import InstanceProfile, Profiles, StageProfile, TimePoint

FLOAT32_RATE = 1 / 16
"""Share of the bf16 rate that float32 reaches outside the tensor cores: 19.5 of 312 TFLOP/s (A100 datasheet), 67 of 989
(H100)."""
NUM_MOMENTS = 2
"""Running averages that AdamW keeps for each weight, in the type of the weights."""
FLOAT_BYTES = 4
NUM_LOGIT_COPIES = 3
"""float32 tensors of the size of the logits that exist at the peak of a backward pass: the logits at the temperature,
their logarithmic softmax and its gradient."""
MAX_LOGITS_BYTES = 1 << 30
"""Bytes of a pass's logits in float32 above which the head works in tiles; so many bytes of logits are kept for the
backward pass, the others are computed again."""
TILE_BYTES = 640 << 20
"""Bytes of the buffers in which a head without logits works on a GPU: two of 256 MiB in float32, one below that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedJob:
    """What a step asks of such a system. `lengths.prompt_tokens` is the longest prompt."""

    lengths: Lengths
    num_groups: int
    dtype_bytes: int = 4
    """Bytes of each number in weights, gradients, moments and activations."""
    num_shards: int = 1
    """Gradient buffers, dealt out to the ranks of the trainer."""
    is_sharded: bool = False
    """The trainer's ranks hold one copy together, cut by FSDP2: weights, one gradient and moments."""
    compute_bytes: int | None = None
    """Bytes of each number in what a sharded trainer computes; None: `dtype_bytes`."""
    recomputes: bool = False
    """A sharded trainer computes the feed-forward half of each layer again in the backward pass."""
    micro_batch_groups: int = 1
    """Groups of one forward and backward pass."""
    num_updates: int = 1
    """Optimizer steps of a batch."""
    has_critic: bool = False
    """A second model of the same shape in the trainer's processes."""
    warm_start_sequences: int = 0
    """Whole sequences of one forward and backward pass of a supervised warm start, whose moments stay; 0: there is
    none."""
    max_sequences: int = 512
    """Most sequences that a rank generates at once."""

    def __post_init__(self) -> None:
        for key in ("num_groups", "dtype_bytes", "num_shards", "micro_batch_groups", "num_updates", "max_sequences"):
            if getattr(self, key) < 1:
                raise ProfileError(f"{key}={getattr(self, key)} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on the device of one rank, by what they are for."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    work: int = 0
    """Further bytes at the peak of the rank's turn."""
    work_of_item: int = 0
    """Further bytes for each item that is worked on at once."""
    host_start: int = 0
    """Bytes of host memory that the rank needs beside its state while it is made or loads a checkpoint."""

    @property
    def state(self) -> int:
        """Bytes that stay between the rank's turns."""
        return self.weights + self.gradients + self.optimizer

    def peak(self, num_items: int = 1) -> int:
        """Bytes while the rank works on so many items at once."""
        return self.state + self.work + num_items * self.work_of_item

    def describe(self, num_items: int = 1) -> str:
        """The parts in words: `weights 28.4, gradients 28.4, optimizer 56.7, work 3.1 GiB`."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "work": self.work + num_items * self.work_of_item,
        }
        return ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items() if size) + " GiB"


def trainer_memory(model: ModelShape, job: ReplicatedJob, num_ranks: int) -> RankMemory:
    """The memory of one of `num_ranks` ranks that train."""
    copy = job.dtype_bytes * model.num_parameters
    num_buffers = -(-job.num_shards // num_ranks)
    num_models = 2 if job.has_critic else 1
    if job.is_sharded:
        part = -(-copy // num_ranks)
        return RankMemory(
            weights=num_models * part,
            gradients=num_models * part,
            optimizer=NUM_MOMENTS * num_models * part,
            work=_sharded_work(model, job),
            host_start=2 * copy,
        )
    return RankMemory(
        weights=num_models * copy,
        gradients=num_models * num_buffers * copy,
        optimizer=NUM_MOMENTS * num_models * copy,
        work=max(_update_bytes(model, job), _warm_start_bytes(model, job)),
    )


def forward_memory(model: ModelShape, job: ReplicatedJob) -> RankMemory:
    """The memory of a rank that computes log-probabilities, a group at a time: first the inside of one layer, then the
    logits."""
    lengths, size = job.lengths, job.lengths.group_size
    layer = size * lengths.limit_tokens * 4 * _mlp_width(model) * job.dtype_bytes
    logits = _head_bytes(model, job, size * lengths.limit_tokens, 2 * job.dtype_bytes + 2 * FLOAT_BYTES, num_kept=0)
    cache = size * (lengths.prompt_tokens + lengths.limit_tokens) * _kv_bytes(model, job)
    return RankMemory(weights=job.dtype_bytes * model.num_parameters, work=cache + max(layer, logits))


def generator_memory(model: ModelShape, job: ReplicatedJob) -> RankMemory:
    """The memory of a rank that generates; an item is a group. Caches grow by copying, one layer at a time."""
    lengths = job.lengths
    context = lengths.prompt_tokens + lengths.limit_tokens
    cache = context * _kv_bytes(model, job) * (1 + 1 / model.num_layers)
    logits = model.vocab_size * (job.dtype_bytes + NUM_LOGIT_COPIES * FLOAT_BYTES)
    return RankMemory(
        weights=job.dtype_bytes * model.num_parameters, work_of_item=round(lengths.group_size * (cache + logits))
    )


def replicated_profiles(
    flow: FlowGraph, model: ModelShape, gpu: Gpu, job: ReplicatedJob, reference: ModelShape | None = None
) -> Profiles:
    """Profiles of the stages of a reasoning flow.

    Args:
        reference: shape of the reference's own model; None: the reference has the policy's.
    """
    models = {stage.name: reference if stage.role == "reference" and reference else model for stage in flow.stages}
    return Profiles(stages={stage.name: _stage_profile(stage, models[stage.name], gpu, job) for stage in flow.stages})


def _stage_profile(stage: Stage, model: ModelShape, gpu: Gpu, job: ReplicatedJob) -> StageProfile:
    size = job.lengths.group_size
    if not stage.needs_device:
        return host_profile(RULE_REWARD_S * size, job.num_groups, source="derived: a rule of 2 ms for each answer")
    if stage.trains:
        return _train_profile(model, gpu, job)
    if stage.role == "rollout":
        return _generate_profile(model, gpu, job)
    return _forward_profile(model, gpu, job)


def _train_profile(model: ModelShape, gpu: Gpu, job: ReplicatedJob) -> StageProfile:
    """One choice for each number of ranks, which decides how many gradient buffers a rank has."""
    copy = job.dtype_bytes * model.num_parameters
    kind = "sharded" if job.is_sharded else "replicated"
    num_models = 2 if job.has_critic else 1
    item_s = 3 * num_models * _forward_s(model, gpu, job)
    instances = []
    for num_ranks in (count for count in range(1, job.num_shards + 1) if job.num_shards % count == 0):
        memory = trainer_memory(model, job, num_ranks)
        sent = 3 * _num_passes(job, num_ranks) if job.is_sharded else 2  # gathered twice and reduced in each pass
        reduce_s = sent * copy / gpu.network_bytes_per_s if num_ranks > 1 else 0.0
        stepped = copy // num_ranks if job.is_sharded else copy
        moved = (3 + 2 * NUM_MOMENTS) * stepped  # weights and moments are read and written, the gradient is read
        instances.append(
            InstanceProfile(
                num_ranks=num_ranks,
                points=_proportional(item_s, job.num_groups),
                step_s=job.num_updates * num_models * (reduce_s + moved / gpu.memory_bytes_per_s),
                state_bytes=memory.state,
                work_bytes=memory.work,
            )
        )
    return StageProfile(
        instances=tuple(instances),
        costs=job.lengths.total_costs,
        weights_bytes=copy,
        source=f"derived: {kind} AdamW training of {model.name} on {gpu.name}, {_how(model, job)}",
    )


def _num_passes(job: ReplicatedJob, num_ranks: int) -> int:
    """Micro-batches of an update on a rank."""
    groups = -(-job.num_groups // (num_ranks * job.num_updates))
    return max(1, -(-groups // job.micro_batch_groups))


def _forward_profile(model: ModelShape, gpu: Gpu, job: ReplicatedJob) -> StageProfile:
    memory = forward_memory(model, job)
    instance = InstanceProfile(
        points=_proportional(_forward_s(model, gpu, job), job.num_groups),
        state_bytes=memory.state,
        work_bytes=memory.work,
    )
    return StageProfile(
        instances=(instance,),
        costs=job.lengths.total_costs,
        weights_bytes=memory.weights,
        source=f"derived: forward pass of {model.name} on {gpu.name}, {_how(model, job)}",
    )


def _generate_profile(model: ModelShape, gpu: Gpu, job: ReplicatedJob) -> StageProfile:
    """A batch runs in eager mode until its longest answer ends, all of its rows at every token."""
    lengths, memory = job.lengths, generator_memory(model, job)
    most = max(1, min(job.num_groups, job.max_sequences // lengths.group_size))
    rate = utilisation(model) * _flops_per_s(gpu, job)
    points = []
    for n in powers_up_to(most):
        rows = n * lengths.group_size
        read = job.dtype_bytes * model.num_parameters + rows * lengths.mean_context_tokens * _kv_bytes(model, job)
        token_s = max(
            read / (BANDWIDTH_UTILISATION * gpu.memory_bytes_per_s),
            rows * model.forward_flops(lengths.mean_context_tokens) / rate,
            model.num_layers * EAGER_LAYER_S,
        )
        prefill_s = n * lengths.prompt_tokens * model.forward_flops(lengths.prompt_tokens / 2) / rate
        points.append(TimePoint(num_items=n, seconds=lengths.longest_of_group_tokens * token_s + prefill_s))
    instance = InstanceProfile(
        points=tuple(points), max_items=most, state_bytes=memory.state, item_work_bytes=memory.work_of_item
    )
    return StageProfile(
        instances=(instance,),
        batching="longest",
        costs=lengths.longest_costs,
        weights_bytes=memory.weights,
        source=f"derived: eager decoding of {model.name} in static batches on {gpu.name}, {_how(model, job)}",
    )


def _update_bytes(model: ModelShape, job: ReplicatedJob) -> int:
    """Bytes that autograd holds for a micro-batch of groups, at the start of its backward pass or when only the prompts
    are left of it, whichever is more.

    A prompt is computed once for all its completions, in a forward pass of its own. So every weight is used twice, and
    autograd holds the gradient of one use, a whole copy of the weights, until it has that of the other.
    """
    prompts, completions = _micro_batch_bytes(model, job)
    return prompts + max(completions, job.dtype_bytes * model.num_parameters)


def _micro_batch_bytes(model: ModelShape, job: ReplicatedJob) -> tuple[int, int]:
    """Bytes that autograd holds of a micro-batch's prompts, and of its completions."""
    lengths = job.lengths
    num_groups = min(job.micro_batch_groups, max(1, job.num_groups // job.num_shards))
    num_answered = lengths.group_size * lengths.limit_tokens
    num_attended = lengths.group_size * (lengths.prompt_tokens + lengths.limit_tokens)
    prompts = num_groups * _kept_bytes(model, job, lengths.prompt_tokens, lengths.prompt_tokens)
    completions = num_groups * _kept_bytes(model, job, num_answered, num_attended)
    completions += _trained_head_bytes(model, job, num_groups * num_answered)
    return prompts, completions


def _sharded_work(model: ModelShape, job: ReplicatedJob) -> int:
    """Bytes at the peak of a sharded model's backward pass, beside the parts that the rank keeps.

    What is in no layer is gathered for the whole pass and has a whole gradient until the end of it. Of the layers, one
    is in use, the next is on its way and a third has its gradient. A gradient is sent in the dtype of the weights.
    """
    computed = replace(job, dtype_bytes=job.compute_bytes or job.dtype_bytes)
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    rest = embeddings + model.hidden_size + model.vision_parameters
    layer = -(-(model.num_parameters - rest) // model.num_layers)
    gathered = computed.dtype_bytes * (2 * rest + 3 * layer) + job.dtype_bytes * max(rest, layer)
    return gathered + max(sum(_micro_batch_bytes(model, computed)), _warm_start_bytes(model, computed))


def _warm_start_bytes(model: ModelShape, job: ReplicatedJob) -> int:
    """Bytes that autograd holds for a batch of whole sequences."""
    num_tokens = job.warm_start_sequences * (job.lengths.prompt_tokens + job.lengths.limit_tokens)
    return _kept_bytes(model, job, num_tokens, num_tokens) + _trained_head_bytes(model, job, num_tokens)


def _kept_bytes(model: ModelShape, job: ReplicatedJob, num_tokens: int, num_attended: int) -> int:
    """Bytes that autograd keeps in all layers.

    Counted in the blocks of transformers' Llama and Qwen2. For each token: input, normalised and scaled values of two
    norms (6 h, the last of each being the input of projections; below float32 also a float32 copy of both inputs),
    queries, the output of attention and its contiguous copy (3 q), and gate, up, activation and product (4 I). For each
    token that a row attends to: keys and values, once for each query head where a mask hides padding (2 q).
    """
    query_width = model.num_heads * model.head_dim
    of_mlp = 0 if job.recomputes else 4 * _mlp_width(model)
    of_token = job.dtype_bytes * (6 * model.hidden_size + 3 * query_width + of_mlp)
    if job.dtype_bytes < FLOAT_BYTES:
        of_token += 2 * FLOAT_BYTES * model.hidden_size
    again = num_tokens * 4 * _mlp_width(model) * job.dtype_bytes if job.recomputes else 0  # one layer at a time
    return again + model.num_layers * (num_tokens * of_token + num_attended * 2 * query_width * job.dtype_bytes)


def _trained_head_bytes(model: ModelShape, job: ReplicatedJob, num_tokens: int) -> int:
    """Bytes of a backward pass through the head, gradients of weights aside."""
    of_logit = 2 * job.dtype_bytes + NUM_LOGIT_COPIES * FLOAT_BYTES
    return _head_bytes(model, job, num_tokens, of_logit, num_kept=MAX_LOGITS_BYTES)


def _head_bytes(model: ModelShape, job: ReplicatedJob, num_tokens: int, of_logit: int, *, num_kept: int) -> int:
    """Bytes of so many tokens' logits and of what is computed from them, `of_logit` each; or, where they are too many,
    of tiles, of the logits that are kept and of the states' gradients."""
    num_logits = num_tokens * model.vocab_size
    if FLOAT_BYTES * num_logits <= MAX_LOGITS_BYTES:
        return num_logits * of_logit
    return TILE_BYTES + num_kept + num_tokens * model.hidden_size * (2 * job.dtype_bytes + FLOAT_BYTES)


def _mlp_width(model: ModelShape) -> int:
    return model.num_active_experts * model.expert_intermediate_size if model.num_experts else model.intermediate_size


def _kv_bytes(model: ModelShape, job: ReplicatedJob) -> int:
    """Bytes of one token's keys and values in all layers."""
    return model.kv_bytes_per_token * job.dtype_bytes // BYTES_PER_PARAMETER


def _flops_per_s(gpu: Gpu, job: ReplicatedJob) -> float:
    return gpu.flops_per_s * (FLOAT32_RATE if job.dtype_bytes > BYTES_PER_PARAMETER else 1.0)


def _forward_s(model: ModelShape, gpu: Gpu, job: ReplicatedJob) -> float:
    """Seconds of a forward pass over one group, whose prompt is computed once."""
    lengths = job.lengths
    num_tokens = lengths.prompt_tokens + lengths.group_size * lengths.mean_tokens
    flops = num_tokens * model.forward_flops(lengths.mean_context_tokens)
    return flops / (utilisation(model) * _flops_per_s(gpu, job))


def _proportional(item_s: float, most: int) -> tuple[TimePoint, ...]:
    return tuple(TimePoint(num_items=n, seconds=n * item_s) for n in powers_up_to(most))


def _how(model: ModelShape, job: ReplicatedJob) -> str:
    dtype = {2: "bfloat16", 4: "float32"}.get(job.dtype_bytes, f"{job.dtype_bytes} bytes a number")
    return f"{dtype}, at {utilisation(model):.0%} of its rate"

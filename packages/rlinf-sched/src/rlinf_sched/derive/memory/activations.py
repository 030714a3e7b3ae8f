"""Activations that a pass through a decoder of the Llama family keeps for its backward pass, and the memory of the
head."""

from dataclasses import dataclass, replace

from rlinf_sched.derive.memory.adapters import FLOAT_BYTES
from rlinf_sched.derive.memory.job import JobShape
from rlinf_sched.derive.shapes import BYTES_PER_PARAMETER, ModelShape

MAX_LOGITS_BYTES = 1 << 30
"""Bytes of a pass's logits in float32 above which the head works in tiles; so many bytes of logits are kept for the
backward pass, the others are computed again."""
GPU_CHUNK_BYTES = 256 << 20
"""Bytes of float32 in which the statistics of logits are computed at once on a GPU (rlinf_algos.logprobs)."""
CPU_CHUNK_BYTES = 4 << 20
"""The same on a CPU."""
GPU_TILE_BYTES, CPU_TILE_BYTES = 640 << 20, 160 << 20
"""Bytes of the buffers in which a head without logits works: two in float32 (256 or 64 MiB each), one below that
(rlinf_algos.head)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """The shape of a model call: rows of new tokens, each after tokens with cached keys and values."""

    num_rows: int
    num_tokens: int
    """New tokens of a row."""
    num_before: int = 0
    """Tokens of a row with cached keys and values."""
    recomputes: bool = False
    """Recompute the feed-forward half of each layer in the backward pass."""
    is_packed: bool = False
    """The rows are packed into one without padding, and there is no mask."""

    @property
    def all_tokens(self) -> int:
        """New tokens of all rows."""
        return self.num_rows * self.num_tokens


def passes_of_micro_batch(job: JobShape, *, recomputes: bool = False) -> tuple[Pass, Pass]:
    """The call for a micro-batch's prompts, and the one for its completions; a prompt is computed once."""
    lengths = job.lengths
    num_groups = min(job.micro_batch_groups, max(1, job.num_groups // job.num_shards))
    prompts = Pass(num_rows=num_groups, num_tokens=lengths.prompt_tokens, recomputes=recomputes)
    num_rows = num_groups * lengths.group_size
    return prompts, replace(
        prompts, num_rows=num_rows, num_tokens=lengths.limit_tokens, num_before=lengths.prompt_tokens
    )


def packed_pass(job: JobShape, *, recomputes: bool = False) -> Pass | None:
    """The call for a rank's part of the largest packed micro-batch: completions of the longest kind, whose tokens and
    those of their prompts fill the budget. None where micro-batches are padded."""
    if job.max_tokens_per_micro_batch is None:
        return None
    lengths = job.lengths
    group_tokens = lengths.prompt_tokens + lengths.group_size * lengths.limit_tokens
    num_tokens = min(job.max_tokens_per_micro_batch, max(1, job.num_groups // job.num_shards) * group_tokens)
    num_tokens = -(-num_tokens // job.sequence_ranks)
    num_rows = max(1, num_tokens // lengths.limit_tokens)
    return Pass(
        num_rows=num_rows,
        num_tokens=-(-num_tokens // num_rows),
        num_before=lengths.prompt_tokens,
        recomputes=recomputes,
        is_packed=True,
    )


def update_bytes(model: ModelShape, job: JobShape, *, recomputes: bool = False) -> int:
    """Bytes at the peak of a micro-batch's backward pass: at its start, or when only the prompts are left of it,
    whichever is more.

    A prompt is computed once for all its completions, in a forward pass of its own. So every weight is used twice, and
    autograd holds the gradient of one use, a whole copy of the weights, until it has that of the other. For the head,
    with which the prompts' backward pass begins, both and their sum are there at once. Tied embeddings come to that
    earlier, while the gradient of the logits is there. A packed micro-batch goes through the model once.
    """
    packed = packed_pass(job, recomputes=recomputes)
    if packed is not None:
        return layers_bytes(model, job, packed) + turn_bytes(model, job, packed)
    prompts, completions = passes_of_micro_batch(job, recomputes=recomputes)
    start = layers_bytes(model, job, completions) + turn_bytes(model, job, completions)
    if (adapter := job.sole_adapter) is None:
        held_back = job.dtype_bytes * model.num_parameters + 2 * head_gradient_bytes(model, job)
    else:
        held_back = FLOAT_BYTES * adapter.num_parameters(model)
    held_back += prompts.all_tokens * kv_bytes(model, job)  # gradients of what completions attend to
    if model.tied_embeddings:
        held_back += logits_bytes(model, job, completions) // 2
    return layers_bytes(model, job, prompts) + max(start, held_back)


def sft_warm_up_bytes(model: ModelShape, job: JobShape, *, recomputes: bool = False) -> int:
    """Bytes at the peak of a backward pass over a batch of whole sequences."""
    num_tokens = job.lengths.prompt_tokens + job.lengths.limit_tokens
    whole = Pass(
        num_rows=-(-job.sft_warm_up_sequences // job.sequence_ranks), num_tokens=num_tokens, recomputes=recomputes
    )
    return layers_bytes(model, job, whole) + turn_bytes(model, job, whole)


def layers_bytes(model: ModelShape, job: JobShape, call: Pass) -> int:
    """Bytes that autograd keeps of a call until its backward pass, the head's logits aside.

    Counted in the blocks of transformers' Qwen2, Qwen3, Qwen3-MoE, Llama and DeepSeek-V3, tensor by tensor as autograd
    records them (`saved_tensors_hooks`). d is the bytes of a number, F = 4 those of a float32. For each token and
    layer:

        two norms           2 h (F + 2 d)   the input in float32, the normalised value, the input of what follows
        norms of q and k    (q + k)(F + d)  models of the Qwen3 family
        attention           2 q d + F heads queries, output, logarithmic sums of the scores
        latent attention    l (F + 2 d)     the l numbers of both latent vectors, as a norm's; and C d for each key and
                                            head, the part without position, with which the values were computed
        mask                K d             one number for each key of the row, converted anew in each layer
        gated MLP           4 I d           gate, activation, up, product
        experts             n (2 h + 4 I) d gathered input and output, and the MLP's, for each of the token's n experts
        router              h d + F E       its input is the norm's, its probabilities

    For each key of a row: keys and values, repeated for every query head because of the mask (2 q d). A packed call has
    no mask of a row and repeats nothing (2 k d); its output is kept in the order of the row, too (q d). Attention is
    taken to be fused (flash or memory-efficient), as torch chooses it on CPUs and GPUs: no [T, K] scores are kept.
    The last norm and the input of the head come on top.

    Where an adapter alone is trained, normalised values are not kept, and inputs only of layers that it changes: one
    for all of them, or a copy in float32 for each where d is not F; and what comes out of its first matrix (r F). What
    is computed again is not kept; its input is the norm's.
    """
    d, h, q = job.dtype_bytes, model.hidden_size, model.num_heads * model.head_dim
    num_keys = call.num_before + call.num_tokens
    key_width = model.num_kv_heads * model.head_dim if call.is_packed else q
    adapter = job.sole_adapter
    norm = FLOAT_BYTES + (d if adapter is None else 0)
    of_token = 2 * h * norm + 2 * q * d + FLOAT_BYTES * model.num_heads + (q if call.is_packed else num_keys) * d
    of_token += _inputs_bytes(model, job, h, "q_proj", "k_proj", "v_proj")
    of_token += _inputs_bytes(model, job, h, "gate_proj", "up_proj")
    if model.qk_norm:
        of_token += (q + model.num_kv_heads * model.head_dim) * norm
    of_keys = 2 * key_width * d
    if (latent := model.latent) is not None:
        of_token += (latent.q_rank + latent.kv_rank) * (norm + d)
        of_keys += 0 if call.is_packed else model.num_heads * latent.nope_dim * d
    if adapter is not None:
        of_token += FLOAT_BYTES * adapter.rank * len(adapter.ends(model))
        of_token += 0 if d == FLOAT_BYTES else _inputs_bytes(model, job, q, "o_proj")
    of_token += 0 if call.recomputes else feed_forward_bytes(model, job)
    of_layers = model.num_layers * (call.all_tokens * of_token + call.num_rows * num_keys * of_keys)
    return of_layers + call.all_tokens * h * (norm + (d if adapter is None else 0))


def _inputs_bytes(model: ModelShape, job: JobShape, width: int, *layers: str) -> int:
    """Bytes of a token's input to some linear layers, as far as their gradients need it."""
    if job.sole_adapter is None:
        return width * job.dtype_bytes
    num_changed = len(job.sole_adapter.ends(model).intersection(layers))
    return width * FLOAT_BYTES * (min(1, num_changed) if job.dtype_bytes == FLOAT_BYTES else num_changed)


def feed_forward_bytes(model: ModelShape, job: JobShape) -> int:
    """Bytes that the feed-forward half of a layer keeps for a token, its input aside; of a layer with experts, if the
    model has any."""
    d, width = job.dtype_bytes, model.shared_intermediate_size if model.num_experts else model.intermediate_size
    of_mlp = 3 * width * d + _inputs_bytes(model, job, width, "down_proj") if width else 0
    of_expert = (2 * model.hidden_size + 4 * model.expert_intermediate_size) * d
    return of_mlp + model.num_active_experts * of_expert + FLOAT_BYTES * model.num_experts


def turn_bytes(model: ModelShape, job: JobShape, call: Pass) -> int:
    """Bytes that a backward pass adds where it begins: the logits and the gradient of the head, or the inside of the
    last layer, whichever is more.

    The inside of a layer is the gradient of its feed-forward half, or in packed rows on GPUs that of gathered keys and
    values, which variable-length attention makes for every query head.

    The logits are kept once, in the dtype of the model. Their gradient is made beside them, in chunks
    (rlinf_algos.logprobs); when they are freed, the head's products take a copy of it without gaps.
    """
    logits = logits_bytes(model, job, call)
    inside = 2 * call.all_tokens * mlp_width(model) * job.dtype_bytes
    if call.is_packed and job.on_gpu and job.dtype_bytes < FLOAT_BYTES:
        keys = call.num_rows * (call.num_before + call.num_tokens)
        inside = max(inside, 2 * keys * model.num_heads * model.head_dim * job.dtype_bytes)
    if call.recomputes:
        inside += call.all_tokens * feed_forward_bytes(model, job)
    head = 0 if job.sole_adapter else head_gradient_bytes(model, job)
    chunk = min(FLOAT_BYTES * call.all_tokens * model.vocab_size, GPU_CHUNK_BYTES if job.on_gpu else CPU_CHUNK_BYTES)
    return max(logits + max(chunk, head), inside + head)


def logits_bytes(model: ModelShape, job: JobShape, call: Pass) -> int:
    """Bytes of a call's logits and their gradient, or of what works in place of them."""
    return head_bytes(model, job, call.all_tokens, 2 * job.dtype_bytes, num_kept=MAX_LOGITS_BYTES)


def head_gradient_bytes(model: ModelShape, job: JobShape) -> int:
    """Bytes of the gradient of the head."""
    return model.vocab_size * model.hidden_size * job.dtype_bytes


def head_bytes(model: ModelShape, job: JobShape, num_tokens: int, of_logit: int, *, num_kept: int) -> int:
    """Bytes of so many tokens' logits and of what is computed from them, `of_logit` each; or, where they are too many,
    of tiles, of the logits that are kept and of the states' gradients."""
    num_logits = num_tokens * model.vocab_size
    if FLOAT_BYTES * num_logits <= MAX_LOGITS_BYTES:
        return num_logits * of_logit
    tiles = GPU_TILE_BYTES if job.on_gpu else CPU_TILE_BYTES
    return tiles + num_kept + num_tokens * model.hidden_size * (2 * job.dtype_bytes + FLOAT_BYTES)


def mlp_width(model: ModelShape) -> int:
    """Width of the feed-forward half that a token goes through."""
    if not model.num_experts:
        return model.intermediate_size
    return model.num_active_experts * model.expert_intermediate_size + model.shared_intermediate_size


def kv_bytes(model: ModelShape, job: JobShape) -> int:
    """Bytes of one token's keys and values in all layers."""
    return model.kv_bytes_per_token * job.dtype_bytes // BYTES_PER_PARAMETER

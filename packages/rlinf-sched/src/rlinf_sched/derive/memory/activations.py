"""What a pass through a decoder of the Llama family keeps for its backward pass, and what the head takes."""

from rlinf_sched.derive.memory.job import FLOAT_BYTES, ReplicatedJob
from rlinf_sched.derive.shapes import BYTES_PER_PARAMETER, ModelShape

NUM_LOGIT_COPIES = 3
"""float32 tensors of the size of the logits that exist at the peak of a backward pass: the logits at the temperature,
their logarithmic softmax and its gradient."""
MAX_LOGITS_BYTES = 1 << 30
"""Bytes of a pass's logits in float32 above which the head works in tiles; so many bytes of logits are kept for the
backward pass, the others are computed again."""
TILE_BYTES = 640 << 20
"""Bytes of the buffers in which a head without logits works on a GPU: two of 256 MiB in float32, one below that."""


def micro_batch_bytes(model: ModelShape, job: ReplicatedJob, *, recomputes: bool = False) -> tuple[int, int]:
    """Bytes that autograd holds of a micro-batch's prompts, and of its completions; of a packed one, which goes through
    the model once, 0 and all of it."""
    lengths, packed = job.lengths, job.packed_tokens
    if packed is not None:
        attended = packed + packed // lengths.limit_tokens * lengths.prompt_tokens  # each completion has its prompt
        return 0, kept_bytes(model, job, packed, attended, recomputes=recomputes) + trained_head_bytes(
            model, job, packed
        )
    num_groups = min(job.micro_batch_groups, max(1, job.num_groups // job.num_shards))
    num_answered = lengths.group_size * lengths.limit_tokens
    num_attended = lengths.group_size * (lengths.prompt_tokens + lengths.limit_tokens)
    prompts = kept_bytes(model, job, num_groups * lengths.prompt_tokens, num_groups * lengths.prompt_tokens)
    completions = kept_bytes(model, job, num_groups * num_answered, num_groups * num_attended, recomputes=recomputes)
    return prompts, completions + trained_head_bytes(model, job, num_groups * num_answered)


def warm_start_bytes(model: ModelShape, job: ReplicatedJob, *, recomputes: bool = False) -> int:
    """Bytes that autograd holds for a batch of whole sequences."""
    num_tokens = job.warm_start_sequences * (job.lengths.prompt_tokens + job.lengths.limit_tokens)
    return kept_bytes(model, job, num_tokens, num_tokens, recomputes=recomputes) + trained_head_bytes(
        model, job, num_tokens
    )


def kept_bytes(
    model: ModelShape, job: ReplicatedJob, num_tokens: int, num_attended: int, *, recomputes: bool = False
) -> int:
    """Bytes that autograd keeps in all layers.

    Counted in the blocks of transformers' Llama and Qwen2. For each token: input, normalised and scaled values of two
    norms (6 h, the last of each being the input of projections; below float32 also a float32 copy of both inputs),
    queries, the output of attention and its contiguous copy (3 q), and gate, up, activation and product (4 I). For each
    token that a row attends to: keys and values, once for each query head where a mask hides padding (2 q).

    Args:
        recomputes: the feed-forward half of each layer is computed again in the backward pass.
    """
    query_width = model.num_heads * model.head_dim
    of_mlp = 0 if recomputes else 4 * mlp_width(model)
    of_token = job.dtype_bytes * (6 * model.hidden_size + 3 * query_width + of_mlp)
    if job.dtype_bytes < FLOAT_BYTES:
        of_token += 2 * FLOAT_BYTES * model.hidden_size
    again = num_tokens * 4 * mlp_width(model) * job.dtype_bytes if recomputes else 0  # one layer at a time
    return again + model.num_layers * (num_tokens * of_token + num_attended * 2 * query_width * job.dtype_bytes)


def trained_head_bytes(model: ModelShape, job: ReplicatedJob, num_tokens: int) -> int:
    """Bytes of a backward pass through the head, gradients of weights aside."""
    of_logit = 2 * job.dtype_bytes + NUM_LOGIT_COPIES * FLOAT_BYTES
    return head_bytes(model, job, num_tokens, of_logit, num_kept=MAX_LOGITS_BYTES)


def head_bytes(model: ModelShape, job: ReplicatedJob, num_tokens: int, of_logit: int, *, num_kept: int) -> int:
    """Bytes of so many tokens' logits and of what is computed from them, `of_logit` each; or, where they are too many,
    of tiles, of the logits that are kept and of the states' gradients."""
    num_logits = num_tokens * model.vocab_size
    if FLOAT_BYTES * num_logits <= MAX_LOGITS_BYTES:
        return num_logits * of_logit
    return TILE_BYTES + num_kept + num_tokens * model.hidden_size * (2 * job.dtype_bytes + FLOAT_BYTES)


def mlp_width(model: ModelShape) -> int:
    """Width of the feed-forward half that a token goes through."""
    return model.num_active_experts * model.expert_intermediate_size if model.num_experts else model.intermediate_size


def kv_bytes(model: ModelShape, job: ReplicatedJob) -> int:
    """Bytes of one token's keys and values in all layers."""
    return model.kv_bytes_per_token * job.dtype_bytes // BYTES_PER_PARAMETER

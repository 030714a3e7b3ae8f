"""What a rank holds under the training backend `megatron`."""

from dataclasses import replace

from rlinf_sched.derive.megatron import MegatronOptions
from rlinf_sched.derive.memory.activations import MAX_LOGITS_BYTES, Pass, layers_bytes
from rlinf_sched.derive.memory.job import FLOAT_BYTES, JobShape
from rlinf_sched.derive.memory.rank import NUM_MOMENTS, RankMemory
from rlinf_sched.derive.shapes import ModelShape

OF_LOGIT = 4
"""Float32 numbers for each logit of a chunk at the head's peak: the logits, what is kept, its exponential, the
gradient."""


def megatron_memory(model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
    """The part of a rank in the first or the last stage of the pipeline, whichever is fuller.

    A critic is cut as the policy is. Gradients, masters and moments are float32. Masters are there beside bfloat16
    weights; they and the moments are shared out over replicas by the distributed optimizer.
    """
    cut = MegatronOptions.of(job.backend_options)
    num_replicas = max(1, num_ranks // cut.ranks_per_replica)
    dense, experts = parameters_of_rank(model, cut)
    kept = dense + experts
    if cut.distributed_optimizer:
        kept = -(-dense // (num_replicas * cut.num_parts)) + -(-experts // num_replicas)
    computed, models = compute_bytes(job), job.num_models
    return RankMemory(
        weights=models * computed * (dense + experts),
        masters=0 if computed == FLOAT_BYTES else models * FLOAT_BYTES * kept,
        gradients=models * FLOAT_BYTES * (dense + experts),
        optimizer=models * NUM_MOMENTS * FLOAT_BYTES * kept,
        activations=max(_pass_bytes(model, job, cut, rows) for rows in (_rows(job), job.warm_start_sequences)),
        step=FLOAT_BYTES * kept,
        host_start=FLOAT_BYTES * (dense + experts),
    )


def compute_bytes(job: JobShape) -> int:
    """Bytes of each number that is computed with."""
    return 2 if job.backend_options.get("compute_dtype") == "bfloat16" else FLOAT_BYTES


def parameters_of_rank(model: ModelShape, cut: MegatronOptions) -> tuple[int, int]:
    """Parameters of a rank in the fullest stage: dense ones, and those of experts."""
    tables = 1 if model.tied_embeddings or cut.pipeline_parallel > 1 else 2
    embeddings = tables * model.vocab_size * model.hidden_size
    all_tables = (1 if model.tied_embeddings else 2) * model.vocab_size * model.hidden_size
    in_layers = model.num_parameters - model.num_expert_parameters - all_tables
    dense = (embeddings + in_layers // cut.pipeline_parallel) // cut.tensor_parallel
    of_stage = model.num_expert_parameters // cut.pipeline_parallel
    return dense, of_stage // (cut.expert_parallel * cut.expert_tensor_parallel)


def _rows(job: JobShape) -> int:
    """Sequences of a micro-batch."""
    return job.micro_batch_groups * job.lengths.group_size


def _pass_bytes(model: ModelShape, job: JobShape, cut: MegatronOptions, num_rows: int) -> int:
    """Bytes that autograd keeps of whole sequences, those of as many micro-batches as a pipeline has stages.

    The first stage has 1/stages of the layers and keeps that many micro-batches of them: together all layers of one.
    """
    tp, lengths = cut.tensor_parallel, job.lengths
    num_rows = -(-num_rows // cut.num_parts)
    length = lengths.prompt_tokens + lengths.limit_tokens
    computed = replace(job, dtype_bytes=compute_bytes(job))
    of_layers = layers_bytes(model, computed, Pass(num_rows=num_rows, num_tokens=length))
    if cut.recompute:  # the input of each layer, and one layer's inside
        inputs = model.num_layers * num_rows * length * model.hidden_size * computed.dtype_bytes
        of_layers = inputs + of_layers // model.num_layers
    num_tokens = num_rows * lengths.limit_tokens
    logits = OF_LOGIT * min(FLOAT_BYTES * num_tokens * model.vocab_size // tp, MAX_LOGITS_BYTES)
    return of_layers // tp + logits

"""Memory of a rank under megatron-core, computed without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlinf_sched.derive import (
    CPU_CHUNK_BYTES,
    FLOAT_BYTES,
    GPU_CHUNK_BYTES,
    MAX_LOGITS_BYTES,
    NUM_MOMENTS,
    JobShape,
    ModelShape,
    RankMemory,
    packed_pass,
)
from rlinf_workers.trainers.megatron.options import MegatronOptions

NUM_CHUNKS = 3
"""Float32 chunks of logits that the head holds at once: scaled, shifted, exponentials."""


def megatron_memory(model: ModelShape, job: JobShape, cut: MegatronOptions, num_ranks: int) -> RankMemory:
    """Memory of a rank in the pipeline stage that needs the most: of weights, and of activations.

    A critic is sharded like the policy. Gradients, masters and moments are float32. bfloat16 weights have masters; the
    distributed optimizer shards masters and moments over replicas.
    """
    num_replicas = max(1, num_ranks // cut.ranks_per_replica)
    dense, experts = parameters_of_rank(model, cut)
    share = dense + experts
    if cut.distributed_optimizer:
        share = -(-dense // (num_replicas * cut.num_row_slices)) + -(-experts // num_replicas)
    computed, models = cut.compute_bytes, job.num_models
    is_here = cut.distributed_optimizer is False and computed == FLOAT_BYTES and not job.on_gpu
    copied = 0 if is_here else FLOAT_BYTES * (dense + experts)  # masters or one moment, before they are gathered
    passes = [micro_batch_pass(model, job, cut), _padded_pass(model, job, cut, job.sft_warm_up_sequences)]
    return RankMemory(
        weights=models * computed * (dense + experts),
        masters=0 if computed == FLOAT_BYTES else models * FLOAT_BYTES * share,
        gradients=models * FLOAT_BYTES * (dense + experts),
        optimizer=models * NUM_MOMENTS * FLOAT_BYTES * share,
        activations=max(one.peak_bytes(_num_micro_batches(job, num_replicas)) for one in passes),
        step=FLOAT_BYTES * share,
        host_start=models * FLOAT_BYTES * (dense + experts),
        host_copy=(1 + NUM_MOMENTS) * FLOAT_BYTES * models * model.num_parameters // num_ranks + copied,
    )


def parameters_of_rank(model: ModelShape, cut: MegatronOptions) -> tuple[int, int]:
    """Parameters of a rank in the largest stage: dense ones, and those of experts."""
    table = model.vocab_size * model.hidden_size
    in_layers = model.num_parameters - model.num_expert_parameters - (1 if model.tied_embeddings else 2) * table
    stages = cut.layers_by_stage(model.num_layers)
    sizes = []
    for stage, num_layers in enumerate(stages):
        has_tables = (stage == 0) + (stage == len(stages) - 1)
        tables = min(has_tables, 1) if model.tied_embeddings else has_tables
        dense = (tables * table + num_layers * in_layers // model.num_layers) // cut.tensor_parallel
        experts = num_layers * model.num_expert_parameters // model.num_layers
        sizes.append((dense, experts // (cut.expert_parallel * cut.expert_tensor_parallel)))
    return max(sizes, key=sum)


def micro_batch_pass(model: ModelShape, job: JobShape, cut: MegatronOptions) -> MegatronPass:
    """A rank's part of the largest micro-batch."""
    packed = packed_pass(replace(job, sequence_ranks=cut.num_row_slices))
    if packed is None:
        return _padded_pass(model, job, cut, job.micro_batch_groups * job.lengths.group_size)
    return MegatronPass(
        model=model,
        job=job,
        cut=cut,
        num_tokens=packed.all_tokens,
        num_asked=packed.all_tokens,
        num_packed_keys=packed.num_rows * (packed.num_before + packed.num_tokens),
    )


def _padded_pass(model: ModelShape, job: JobShape, cut: MegatronOptions, num_rows: int) -> MegatronPass:
    """A rank's part of so many whole sequences."""
    lengths, rows = job.lengths, -(-num_rows // cut.num_row_slices)
    return MegatronPass(
        model=model,
        job=job,
        cut=cut,
        num_tokens=rows * (lengths.prompt_tokens + lengths.limit_tokens),
        num_asked=rows * lengths.limit_tokens,
    )


def _num_micro_batches(job: JobShape, num_replicas: int) -> int:
    """Micro-batches of an update on a replica."""
    num_groups = job.num_groups / (num_replicas * job.num_updates)
    if job.max_tokens_per_micro_batch is not None:
        return max(1, math.ceil(num_groups * job.lengths.packed_group_tokens / job.max_tokens_per_micro_batch))
    return max(1, int(num_groups / job.micro_batch_groups))


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronPass:
    """A rank's part of a forward and backward pass through megatron-core's local layers."""

    model: ModelShape
    job: JobShape
    cut: MegatronOptions
    num_tokens: int
    num_asked: int
    """Those of them after which the head is computed."""
    num_packed_keys: int = 0
    """Keys that attention gathers from a packed row for the queries of the rank; 0: rows are padded."""

    def peak_bytes(self, num_micro_batches: int) -> int:
        """What autograd keeps, plus the temporary memory of the backward pass.

        The first pipeline stage keeps as many micro-batches as there are stages; the last stage keeps one and has the
        head. Of a virtual pipeline, whose chunks have 1 / v of the layers of a stage, it keeps those of its other
        chunks too: a pass of a chunk for each of the p stages and each of v - 1 chunks, and two more for each stage
        before the last (arXiv:2104.04473, section 2.2).
        """
        chunks, inside = self.cut.virtual_pipeline_parallel, self._inside_of_layer()
        stages = self.cut.layers_by_stage(self.model.num_layers)
        of_last = (chunks - 1) * len(stages) + 1
        peaks = []
        for before_last, num_layers in enumerate(reversed(stages)):
            passes = of_last + (2 if chunks > 1 else 1) * before_last
            graph_bytes = min(passes, num_micro_batches * chunks) * num_layers * self._kept_layer_bytes // chunks
            peaks.append(graph_bytes + (inside if before_last else max(inside, self._head_bytes())))
        return max(peaks)

    @property
    def kept_bytes(self) -> int:
        """Bytes that autograd keeps for the layers of the longest stage."""
        return max(self.cut.layers_by_stage(self.model.num_layers)) * self._kept_layer_bytes

    @property
    def _kept_layer_bytes(self) -> int:
        """Bytes that autograd keeps for a layer: with recomputation its input."""
        if not self.cut.recompute:
            return self._layer_bytes()
        return self.num_tokens * self.model.hidden_size * self._d // self._num_shared

    @property
    def _d(self) -> int:
        return self.cut.compute_bytes

    @property
    def _num_shared(self) -> int:
        """Ranks that share the positions of a sequence between matrix products (sequence parallelism)."""
        return self.cut.tensor_parallel if self.cut.sequence_parallel else 1

    def _layer_bytes(self) -> int:
        """Bytes that autograd keeps for a layer, counted tensor by tensor. d is the bytes of a number, F those of a
        float32; for each token:

            two norms         2 h (2 F + d)     input and normalised value in float32, input of what follows; a GPU's
                              2 h 2 d           fused norm keeps its input alone
            norms of q and k  2 F q + F k       as above, the float32 keys a copy of their own where d is not F;
                              (2 q + 2 k) d     queries are copied out of the product, which all three came out of
                              (q + 2 k) d       and which is kept for the keys, if packed attention keeps copies
            attention         (3 q + 3 k) d     queries and keys after rotation, the output, and that product, for the
                              + F heads         values; logarithmic sums of the scores
                              4 q d             on a GPU in float32: keys and values are repeated for every query head
            packed attention  (3 q + 2 k') d    queries, keys and values as they are gathered for it, and the output in
                              + F heads         the order of sequences and in that of the row; a GPU repeats keys and
                                                values for every query head
            latent attention  n (4 D + V) d     queries, keys and values, which are as long as keys for the kernel; the
                              + F n             output, and what is not padding of it, for n heads
            its packed rows   n (2 D + V) d     gathered queries and outputs in the order of sequences, the outputs in
                              + 2 n' D d + F n  that of the row; keys and values as they are gathered
            its latent norms  l (2 F + d)       as norms, of the l numbers of both latent vectors
            gated MLP         5 I d             gate and up in one, the activation, up once more, their product
            experts           n (h + 6 I) d     the MLP's with the product weighted, and the input of each
            shared experts    5 I d             as the gated MLP; dense layers of a model with experts count as those
            router            2 F E             scores, as they come and sorted by expert
        """
        d, f, tp, model = self._d, FLOAT_BYTES, self.cut.tensor_parallel, self.model
        h, q, k = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        on_gpu = self.job.on_gpu
        norms = 2 * h * (2 * d if on_gpu else 2 * f + d) // self._num_shared
        repeats = on_gpu and d == f
        keys = self._packed_key_width * self.num_packed_keys // max(1, self.num_tokens)
        if (latent := model.latent) is not None:
            lengths = (2 if self.num_packed_keys else 4) * latent.query_dim + latent.value_dim
            attention = (model.num_heads * lengths + 2 * keys) * d
            of_latent = 2 * d if on_gpu else 2 * f + d
            norms += (latent.q_rank + latent.kv_rank) * of_latent // self._num_shared
        elif self.num_packed_keys:
            attention = (3 * q + 2 * keys) * d
        else:
            attention = (4 * q if repeats else 3 * q + 3 * k) * d
        attention += f * model.num_heads
        if model.qk_norm and on_gpu:
            attention += (2 * q + 2 * k if repeats or self.num_packed_keys else q) * d
        elif model.qk_norm:
            attention += 2 * f * q + (1 if d == f else 2) * f * k
            attention += (q + 2 * k) * d if d == f and self.num_packed_keys else 0
        of_token = norms + attention // tp
        if not model.num_experts:
            return self.num_tokens * (of_token + 5 * model.intermediate_size * d // tp)
        of_token += 2 * f * model.num_experts // self._num_shared + 5 * model.shared_intermediate_size * d // tp
        width = model.expert_intermediate_size // self.cut.expert_tensor_parallel
        return self.num_tokens * of_token + round(self._num_expert_tokens * (h + 6 * width) * d)

    @property
    def _packed_key_width(self) -> int:
        """Width of the keys that a rank gathers for each of its tokens, those of the other tensor parallel ranks
        included. Ranks that share a row need equally many heads of their own; beyond that, several gather the same."""
        model, sharing = self.model, self.cut.num_row_slices
        num_cuts = math.gcd(model.num_heads // self.cut.tensor_parallel, sharing)
        num_kv_heads = model.num_heads if self.job.on_gpu else model.num_kv_heads
        num_heads = math.lcm(num_kv_heads // self.cut.tensor_parallel, num_cuts)
        length = model.head_dim if model.latent is None else model.latent.query_dim
        return self.cut.tensor_parallel * num_heads * (sharing // num_cuts) * length

    @property
    def _num_expert_tokens(self) -> float:
        """Tokens of this rank's experts, if all experts get equally many."""
        return self.num_tokens * self.cut.num_row_slices * self.model.num_active_experts / self.cut.expert_parallel

    def _inside_of_layer(self) -> int:
        """Bytes that the backward pass of a layer adds: gradients of the feed-forward half's activations, or of packed
        attention's, and of its widest matrix; with recomputation also the recomputed activations."""
        model, d = self.model, self._d
        if model.num_experts:
            width = model.expert_intermediate_size // self.cut.expert_tensor_parallel
            gradients = round(3 * self._num_expert_tokens * width * d)
        else:
            width = model.intermediate_size // self.cut.tensor_parallel
            gradients = 3 * self.num_tokens * width * d
        if self.num_packed_keys:  # of gathered keys and values
            gradients = max(
                gradients, 2 * self._packed_key_width * self.num_packed_keys * d // self.cut.tensor_parallel
            )
        again = self._layer_bytes() if self.cut.recompute else 0
        return again + gradients + 2 * width * model.hidden_size * d

    def _head_bytes(self) -> int:
        """The last norm, the query states, logits in the model's dtype, their gradient and float32 chunks; or, if
        larger, that gradient and the head's, which megatron-core adds to the sum when it is complete."""
        model, d, tokens = self.model, self._d, self.num_tokens
        norm = tokens * model.hidden_size * (2 * d if self.job.on_gpu else 2 * FLOAT_BYTES + d)
        num_asked = self.num_asked
        words = model.vocab_size // self.cut.tensor_parallel
        logits = min(num_asked * words, MAX_LOGITS_BYTES // FLOAT_BYTES)
        chunk = min(FLOAT_BYTES * logits, GPU_CHUNK_BYTES if self.job.on_gpu else CPU_CHUNK_BYTES)
        working = max(2 * logits * d + NUM_CHUNKS * chunk, logits * d + words * model.hidden_size * d)
        return norm + num_asked * model.hidden_size * d + working

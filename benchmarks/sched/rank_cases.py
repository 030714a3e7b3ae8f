"""What benchmarks/sched/rank_memory.py and rank_memory_gpu.py measure: roles on ranks, their work, and its count."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf_sched.derive import Adapter, JobShape, Lengths, ModelShape, RankMemory, forward_memory
from rlinf_workers import Worker
from rlinf_workers.models import LoraSettings, ModelSettings, find_targets
from rlinf_workers.models.lora import LoraModel
from rlinf_workers.models.packed import PackedBatch, pack_without_padding
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.plugins import ENGINES, TRAINERS
from rlinf_workers.roles import Prompt
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.trainers import BackendSettings, ModelAdapter, ModelOutputs, OptimizerSettings, TrainingBackend

DTYPES = {"float32": 4, "bfloat16": 2}

MODELS: dict[str, dict[str, Any]] = {
    "dense-31M": {
        "model_type": "qwen2",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8000,
        "tie_word_embeddings": False,
    },
    "dense-67M": {
        "model_type": "qwen2",
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 16000,
        "tie_word_embeddings": True,
    },
    "moe-30M": {
        "model_type": "qwen3_moe",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "moe_intermediate_size": 384,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8000,
        "tie_word_embeddings": False,
    },
}
ON_GPU: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}
"""Shapes that are measured on a GPU alone."""
SHAPES = {**MODELS, **ON_GPU}
SIZES = {"short": (2, 4, 32, 32), "long": (2, 4, 128, 192), "few": (1, 4, 128, 128), "many": (2, 4, 256, 256)}
"""Groups of a micro-batch, completions of each, tokens of a prompt, tokens of a completion."""
BFLOAT16, RECOMPUTE, SHARED = {"compute_dtype": "bfloat16"}, {"recompute": True}, {"sequence_parallel": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A role on ranks of its own."""

    model: str
    size: str = "long"
    role: str = "actor"
    dtype: str = "float32"
    backend: str = "replicated"
    options: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    shards_of_rank: int = 2
    """Micro-batches of an update on each replica, one of a shard."""
    lora_rank: int = 0
    """0: no adapter."""
    is_packed: bool = False
    """The same groups in one row without padding."""

    @property
    def name(self) -> str:
        """`dense-31M long actor fsdp2 x2 float32 recompute=True lora=8 packed`"""
        more = [f"{key}={value}" for key, value in self.options.items()]
        more += [f"shards={self.shards_of_rank}"] if self.shards_of_rank != 2 else []
        more += [f"lora={self.lora_rank}"] if self.lora_rank else []
        more += ["packed"] if self.is_packed else []
        return " ".join([self.model, self.size, self.role, self.backend, f"x{self.num_ranks}", self.dtype, *more])

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one copy of the model together and get the same micro-batches."""
        return TRAINERS.spec(self.backend).ranks_per_replica(self.options) or 1

    @property
    def num_shards(self) -> int:
        """Of the whole batch."""
        return self.shards_of_rank * (self.num_ranks // self.ranks_per_replica)


def cases() -> list[Case]:
    """Three models under three backends in both sizes; what else changes the count, on one model; the other roles."""
    all_cases = []
    for model in MODELS:
        for size in ("short", "long"):
            all_cases += [
                Case(model=model, size=size),
                Case(model=model, size=size, backend="fsdp2", num_ranks=2),
                Case(model=model, size=size, backend="megatron"),
            ]
        all_cases += [Case(model=model, role=role) for role in ("rollout", "reference")]
    replicated = Case(model="dense-31M")
    fsdp2 = replace(replicated, backend="fsdp2", num_ranks=2)
    megatron = replace(replicated, backend="megatron")
    all_cases += [
        replace(replicated, dtype="bfloat16"),
        replace(replicated, shards_of_rank=1),
        replace(fsdp2, model="dense-67M", size="short", num_ranks=4),
    ]
    all_cases += [replace(one, lora_rank=8) for one in (replicated, fsdp2)]
    all_cases += [replace(one, is_packed=True) for one in (replicated, fsdp2)]
    all_cases += [replace(one, num_ranks=2, is_packed=True, options=SHARED) for one in (replicated, fsdp2)]
    all_cases += [replace(one, options=options) for one in (fsdp2, megatron) for options in (BFLOAT16, RECOMPUTE)]
    all_cases += [
        replace(megatron, num_ranks=2, options={"tensor_parallel": 2}),
        replace(megatron, num_ranks=2, options={"tensor_parallel": 2, "sequence_parallel": True}),
        replace(megatron, num_ranks=2, options={"pipeline_parallel": 2}),
        replace(megatron, num_ranks=2, options={"distributed_optimizer": True}),
        replace(megatron, num_ranks=2, options={"distributed_optimizer": True, **BFLOAT16}),
        replace(megatron, num_ranks=2, model="moe-30M", options={"expert_parallel": 2}),
    ]
    return all_cases


def gpu_cases() -> list[Case]:
    """One rank of each backend on a GPU, in float32 and bfloat16, with logits (few) and without (many)."""
    replicated = Case(model="Qwen2.5-0.5B", size="many")
    fsdp2, megatron = (replace(replicated, backend=backend) for backend in ("fsdp2", "megatron"))
    cases = [replicated, replace(replicated, size="few"), replace(replicated, dtype="bfloat16")]
    for one in (fsdp2, megatron):
        cases += [one, replace(one, options=BFLOAT16), replace(one, options=RECOMPUTE)]
    return [*cases, replace(fsdp2, lora_rank=16), replace(fsdp2, is_packed=True), replace(megatron, size="few")]


def make_folder(model: str, folder: str) -> None:
    """A folder with a config and no weights."""
    values = dict(SHAPES[model])
    config = AutoConfig.for_model(values.pop("model_type"), **values, max_position_embeddings=1024)
    config.save_pretrained(folder)


def warm_up(case: Case, device: torch.device) -> None:
    """Imports, and what the first products allocate for good."""
    if case.backend == "megatron":
        if device.type == "cpu":
            from rlinf_workers.trainers.megatron import shim

            shim.apply()
        import rlinf_workers.trainers.megatron.model
        import rlinf_workers.trainers.megatron.optimizer
        import rlinf_workers.trainers.megatron.parallel  # noqa: F401
    if case.lora_rank:
        import peft  # noqa: F401
    few = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    few |= {"vocab_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16}
    values = {**SHAPES[case.model], **few}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
        model(input_ids=torch.ones(2, 4, dtype=torch.int64, device=device)).logits.sum().backward()
        torch.optim.AdamW(model.parameters()).step()


def backend_of(case: Case, model: ModelSettings, worker: Worker) -> TrainingBackend:
    """What a rank of the case holds; frozen where it does not train."""
    settings = BackendSettings(name=case.backend, options=case.options, num_shards=case.num_shards)
    kind: ModelAdapter = TokenModel(model, 1.0)
    if case.lora_rank:
        targets, _ = find_targets(model.folder, ["all-linear"])
        lora = LoraSettings(rank=case.lora_rank, alpha=16.0, targets=targets, base_digest="none")
        kind = LoraModel(kind, model, lora)
    return settings.make(kind, worker, OptimizerSettings(learning_rate=1e-4) if case.role == "actor" else None)


def update(case: Case, backend: TrainingBackend, device: torch.device) -> None:
    """An optimizer step on the longest micro-batches, one a shard."""
    micro_batch = batch(case).to(device)
    backend.begin(1)
    for shard in backend.shards:
        backend.backward(shard, micro_batch, _loss)
    backend.finish_backward()
    backend.step(8.0)


def _loss(answers: ModelOutputs) -> tuple[torch.Tensor, list[float]]:
    return -answers.logprobs.mean(-1).sum(), [1.0]


def batch(case: Case, num_groups: int | None = None) -> SequenceBatch | PackedBatch:
    """The longest micro-batch; one prompt is shorter, so there is a mask where rows are padded."""
    groups, size, prompt_tokens, limit = SIZES[case.size]
    groups, words = num_groups or groups, SHAPES[case.model]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.randint(0, words, (groups, prompt_tokens), generator=generator)
    completion_ids = torch.randint(0, words, (groups * size, limit), generator=generator)
    if case.is_packed:
        return pack_without_padding(
            [
                SampleGroup(
                    prompt=Prompt(index=index, token_ids=row, reference_answer=""),
                    completion_ids=ids,
                    loss_mask=torch.ones(size, limit),
                    rollout_logprobs=torch.zeros(size, limit),
                    policy_version=0,
                )
                for index, (row, ids) in enumerate(zip(prompt_ids, completion_ids.split(size), strict=True))
            ]
        )
    mask = torch.ones(groups, prompt_tokens, dtype=torch.int64)
    mask[0, :2] = 0
    return SequenceBatch(
        prompt_ids=prompt_ids,
        prompt_mask=mask,
        completion_ids=completion_ids,
        loss_mask=torch.ones(groups * size, limit),
    )


def count(case: Case, folder: str, *, on_gpu: bool = False) -> RankMemory:
    """What a rank of the case is said to hold."""
    groups, size, prompt_tokens, limit = SIZES[case.size]
    shape, trainer = ModelShape.from_folder(folder), TRAINERS.spec(case.backend)
    job = JobShape(
        lengths=Lengths(mean_tokens=limit, limit_tokens=limit, prompt_tokens=prompt_tokens, group_size=size),
        num_groups=groups * case.num_shards,
        dtype_bytes=DTYPES[case.dtype],
        num_shards=case.num_shards,
        trainer_options=case.options,
        micro_batch_groups=groups,
        max_tokens_per_micro_batch=groups * (prompt_tokens + size * limit) if case.is_packed else None,
        adapter=Adapter(rank=case.lora_rank) if case.lora_rank else None,
        on_gpu=on_gpu,
    )
    if case.role == "actor":
        return trainer.rank_memory(shape, job, case.num_ranks)
    if case.role == "reference":
        return forward_memory(shape, trainer.computed(job))
    return ENGINES.spec("huggingface").memory(shape, job)

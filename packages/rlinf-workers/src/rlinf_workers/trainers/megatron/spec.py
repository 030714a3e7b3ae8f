"""The training backend `megatron`: tensor, pipeline, context and expert parallelism on megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_envs import VenvSpec
from rlinf_workers.plugins import OptionError
from rlinf_workers.trainers.megatron.options import MegatronOptions
from rlinf_workers.trainers.spec import TrainerSpec

if TYPE_CHECKING:
    from rlinf_sched.derive import JobShape, ModelShape, RankMemory

MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")
"""Architectures (`model_type`) whose mapping was compared with transformers."""


@dataclass(frozen=True, kw_only=True)
class MegatronSpec(TrainerSpec):
    """Only language models."""

    def ranks_per_replica(self, options: Mapping[str, Any]) -> int | None:
        return self.read(options).ranks_per_replica

    def sequence_ranks(self, options: Mapping[str, Any]) -> int:
        return self.read(options).num_row_slices

    def num_communicators(self, options: Mapping[str, Any], num_ranks: int) -> int:
        own = self.read(options)
        sizes = (own.tensor_parallel, own.pipeline_parallel, own.context_parallel, own.expert_parallel)
        replicas = num_ranks // own.ranks_per_replica
        return int(num_ranks > 1) + int(replicas > 1) + sum(size > 1 for size in sizes)

    def compute_dtype(self, options: Mapping[str, Any], model_dtype: str) -> str:
        return self.read(options).compute_dtype

    def dtype_problem(self, options: Mapping[str, Any], model_dtype: str) -> str | None:
        if model_dtype != "bfloat16" or options.get("compute_dtype") == "bfloat16":
            return None
        return "computes in compute_dtype, and bfloat16 is served; set compute_dtype: bfloat16, too"

    def model_problem(self, options: Mapping[str, Any], model: ModelShape) -> tuple[str, str] | None:
        try:
            self.read(options).check_model(model)
        except OptionError as error:
            return error.option, error.text
        return None

    def config_problem(self, options: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
        if not is_installed():
            return "megatron-core is not installed; pip install 'rlinf[megatron]'"
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            return (
                f"model_type={kind!r} has no mapping to megatron-core; supported: {', '.join(MODEL_TYPES)}; "
                "other backends train other models"
            )
        from rlinf_sched.derive import ModelShape

        problem = self.model_problem(options, ModelShape.from_config(config))
        return "".join(problem) if problem else variant_problem(config)

    def notes(self, *, on_gpu: bool) -> tuple[str, ...]:
        if on_gpu:
            return ()
        return (
            "megatron-core runs on CPUs: its CUDA functions are replaced in the actor's processes "
            "(rlinf_workers.trainers.megatron.shim)",
        )

    def smaller(
        self, options: Mapping[str, Any], model_dtype: str, num_devices: int
    ) -> Iterator[tuple[str, Sequence[Any]]]:
        yield from super().smaller(options, model_dtype, num_devices)
        for name in ("tensor_parallel", "expert_parallel"):  # they cost communication
            size = int(options.get(name, 1))
            yield name, [size << doublings for doublings in range(1, (num_devices // size).bit_length())]

    def memory(self, model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
        from rlinf_workers.trainers.megatron.memory import megatron_memory

        return megatron_memory(model, job, self.read(job.trainer_options), num_ranks)

    def cut(self, job: JobShape) -> tuple[int, int]:
        options = self.read(job.trainer_options)
        return options.expert_parallel, options.pipeline_parallel

    def num_chunks(self, job: JobShape) -> int:
        return self.read(job.trainer_options).virtual_pipeline_parallel

    def stage_imbalance(self, model: ModelShape, job: JobShape) -> float:
        stages = self.read(job.trainer_options).layers_by_stage(model.num_layers)
        return max(stages) * len(stages) / model.num_layers


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 has `rope_parameters`, 4 had `rope_theta` beside `rope_scaling`."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def rope_type(rope: Mapping[str, Any]) -> str:
    """The kind of position encoding; transformers 4 had it under another key."""
    return rope.get("rope_type") or rope.get("type") or "default"


def variant_problem(config: Mapping[str, Any]) -> str | None:
    """What of a supported architecture megatron-core would compute differently than transformers; None: nothing."""
    model_type, kind = config["model_type"], rope_type(rope_of(config))
    wrong = {
        f"rope_type={kind!r}": kind not in (("default", "yarn") if model_type == "deepseek_v3" else ("default",)),
        "use_sliding_window=true": bool(config.get("use_sliding_window")),
        f"hidden_act={config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "attention_dropout": bool(config.get("attention_dropout")),
    }
    if model_type in ("glm4_moe", "deepseek_v3"):
        num_groups, num_used = config.get("n_group") or 1, config.get("topk_group") or 1
        num_chosen = config.get("num_experts_per_tok") or 1
        # A group counts by its two best experts in transformers, by as many as each used one gives in megatron-core.
        counts_two = num_groups == 1 or num_chosen // num_used == 2
        wrong |= {
            f"n_group={num_groups} with topk_group={num_used} and num_experts_per_tok={num_chosen}": not counts_two,
            "norm_topk_prob=false": not config.get("norm_topk_prob", True),
            f"num_experts_per_tok={num_chosen}": num_chosen == 1,
        }
    if faults := [name for name, is_wrong in wrong.items() if is_wrong]:
        return (
            f"{', '.join(faults)} in the model's config.json has no equivalent in megatron-core; train with another "
            "backend"
        )
    return None


def is_installed() -> bool:
    """Whether megatron-core is installed."""
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


SPEC = MegatronSpec(
    name="megatron",
    implementation="rlinf_workers.trainers.megatron.make:megatron",
    options=MegatronOptions,
    venv=VenvSpec(
        name="megatron",
        purpose="the backend megatron",
        folder=Path(__file__).parent,
        modules=("megatron.core",),
        packages=("torch", "transformers", "megatron-core"),
    ),
    trains_policies=False,
    trains_adapters=True,
    sequence_option="context_parallel",
    exposes_logits=False,
    exposes_routers=False,
    computes_transformers=False,
)

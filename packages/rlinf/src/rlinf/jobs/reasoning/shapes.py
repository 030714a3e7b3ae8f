"""The planner's view of a reasoning recipe: the shapes of its job and of its models."""

from __future__ import annotations

from pathlib import Path

from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.hub import fetch_model, hub_name
from rlinf_sched import ProfileError
from rlinf_sched.derive import MEAN_SHARE_OF_LIMIT, Adapter, JobShape, Lengths, ModelShape, resolve_model
from rlinf_workers.trainers import DTYPE_BYTES


def job_shape(config: ReasoningConfig, *, on_gpu: bool = True, device_bytes: int = 0) -> JobShape:
    """What a step of the recipe asks of its ranks; `actor.num_shards` is settled.

    Args:
        device_bytes: memory of a device, for an engine that takes a share of it.
    """
    rollout, algorithm, lora = config.rollout, config.algorithm, config.actor.lora
    return JobShape(
        on_gpu=on_gpu,
        adapter=lora and Adapter(rank=lora.rank, targets=None if lora.targets == "all-linear" else lora.targets),
        trainer_options=config.actor.backend_options,
        lengths=Lengths(
            mean_tokens=max(1.0, rollout.max_new_tokens * MEAN_SHARE_OF_LIMIT),
            limit_tokens=rollout.max_new_tokens,
            prompt_tokens=rollout.max_prompt_tokens,
            group_size=config.algorithm.group_size,
        ),
        num_groups=rollout.num_prompts,
        dtype_bytes=DTYPE_BYTES[config.model.dtype],
        served_bytes=DTYPE_BYTES[config.served_dtype],
        num_shards=config.actor.resolved_shards,
        micro_batch_groups=config.actor.micro_batch_groups,
        max_tokens_per_micro_batch=config.actor.max_tokens_per_micro_batch,
        num_updates=algorithm.num_updates,
        has_critic=algorithm.has_critic,
        sft_warm_up_sequences=config.sft_warm_up.batch_size // config.actor.resolved_shards
        if config.sft_warm_up
        else 0,
        engine_options=rollout.engine_options,
        tensor_parallel=rollout.tensor_parallel_size,
        device_bytes=device_bytes,
    )


def shape_of(config: ReasoningConfig, num_words: int) -> ModelShape | None:
    """The shape of the recipe's model; None for an architecture whose parts we cannot count.

    Args:
        num_words: size of the tokenizer's vocabulary, for a model that is made from scratch.
    """
    architecture = config.model.architecture
    if architecture is not None:
        sizes = architecture.model_dump(exclude={"family", "max_positions"})
        width = architecture.hidden_size // architecture.num_heads
        return ModelShape(name=architecture.family, head_dim=width, vocab_size=num_words, qkv_bias=True, **sizes)
    assert config.model.path is not None, "a config has a path or an architecture"
    try:
        return named_shape(config.model.path)
    except ProfileError:
        return None


def named_shape(path: Path) -> ModelShape:
    """The shape of the model in a folder or on the Hub; a few public models are known without a network.

    Raises: ProfileError, and UserError for a name on the Hub that cannot be read.
    """
    name = hub_name(path)
    if name is None:
        return resolve_model(path if path.is_dir() else path.name)
    try:
        return resolve_model(name.repo.partition("/")[2])
    except ProfileError:
        return resolve_model(fetch_model(name, "model.path", config_only=True))


def reference_shape(config: ReasoningConfig, shape: ModelShape) -> ModelShape | None:
    """The shape of the reference's model: the teacher's, or the actor's own. None where the recipe has no reference, or
    where we cannot count the teacher's parts.

    Args:
        shape: the shape of the actor's model.

    Raises: UserError for a teacher that is neither a folder nor a public model.
    """
    if not config.has_reference_worker or config.reference.path is None:
        return shape if config.has_reference_worker else None
    try:
        return named_shape(config.reference.path)
    except ProfileError as error:
        if not config.reference.path.exists():
            raise UserError(f"reference.path: {error}") from error
        return None

"""Rejects a reasoning recipe that needs too much memory, and suggests smaller settings that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.jobs.reasoning.shapes import job_shape
from rlinf.planning.fitting import Key, KeyChange, fitting_changes
from rlinf.planning.memory import MemoryPool
from rlinf_sched.derive import JobShape, ModelShape
from rlinf_workers.plugins import TRAINERS

NOTHING_FITS = (
    "no other number of groups, precision or backend fits: use a smaller model, shorter sequences "
    "(rollout.max_new_tokens, rollout.max_prompt_tokens), stages for more ranks "
    "(actor.backend_options.pipeline_parallel of megatron), or devices with more memory"
)


def check_fits(
    config: ReasoningConfig,
    shape: ModelShape,
    place_of: Callable[[ReasoningConfig], MemoryPool],
    job_of: Callable[[ReasoningConfig], JobShape],
    *,
    num_ranks: int,
    most_ranks: int,
    num_devices: int,
    num_engine_devices: int,
) -> None:
    """Checks that a config has enough memory.

    Args:
        place_of: returns the fullest device, or the host, for a config.
        job_of: returns the planner's job shape for a config on these devices.
        num_ranks: ranks of the actor; `most_ranks` could be, on `num_devices`.
        num_engine_devices: devices of the rollout.

    Raises: UserError with the nearest settings that fit.
    """

    def shortage_of(changed: ReasoningConfig) -> str | None:
        """Why an engine's KV pool is too small for the longest sequence."""
        text = changed.rollout.engine_spec.shortage(shape, job_of(changed))
        return text and f"rollout.engine={changed.rollout.engine}: {text}"

    def fitting(changed: ReasoningConfig) -> int | None:
        cut = cut_refusal(changed, shape, num_devices)
        if cut or num_engine_devices % changed.rollout.tensor_parallel_size or shortage_of(changed):
            return None
        place = place_of(changed)
        return None if place.missing_bytes > 0 else place.needed_bytes

    shortage = shortage_of(config)
    place = None if shortage else place_of(config)
    if place is not None and place.missing_bytes <= 0:
        return
    fits = fitting_changes(config, list(_axes(config, num_ranks, most_ranks, num_devices)), fitting)
    hint = "any of these fits:\n" + "\n".join(f"  {fit.text}" for fit in fits) if fits else NOTHING_FITS
    if place is None:
        raise UserError(shortage or "", hint=hint)
    lines = {f"{load.group} {load.peak / 2**30:.2f} ({load.memory.describe(load.num_items)})" for load in place.loads}
    raise UserError(
        f"model.path: {shape.name}, {shape.num_parameters / 1e9:.2f} billion parameters, does not fit: {place.needs} "
        f"about {place.needed_bytes / 2**30:.1f} GiB, and {place.name} has {place.has_bytes / 2**30:.1f}\n  - "
        + "\n  - ".join(sorted(lines)),
        hint=hint,
    )


def cut_refusal(config: ReasoningConfig, shape: ModelShape, num_devices: int | None = None) -> UserError | None:
    """Returns why engines cannot split the model across their devices, or the actor's backend across `num_devices`.

    Args:
        num_devices: of the actor; None: only engines are checked.
    """
    if text := config.rollout.engine_spec.cut_problem(shape, config.rollout.tensor_parallel_size):
        return UserError(f"rollout.tensor_parallel_size{text}")
    if num_devices is None:
        return None
    options, size = config.actor.backend_options, config.actor.ranks_per_replica or 1
    if problem := config.actor.trainer_spec.model_problem(options, shape):
        return UserError("actor.backend_options." + "".join(problem))
    if num_devices % size:
        return UserError(
            f"cluster.num_devices={num_devices} is not a multiple of the {size} ranks that hold one copy of the model "
            f"(actor.backend_options: {', '.join(f'{key}={value}' for key, value in options.items())})",
            hint="change one of them",
        )
    return None


def _axes(config: ReasoningConfig, num_ranks: int, most_ranks: int, num_devices: int) -> Iterator[list[KeyChange]]:
    """Values of a key to try, mild ones first; the keys in the order of what they cost."""
    actor, spec = config.actor, config.actor.trainer_spec
    budget = actor.max_tokens_per_micro_batch  # costs time alone
    key = ("actor", "micro_batch_groups" if budget is None else "max_tokens_per_micro_batch")
    size = actor.micro_batch_groups if budget is None else budget
    if size > 1:
        yield [KeyChange(key=key, value=size >> halvings) for halvings in range(1, size.bit_length())]
    if most_ranks > num_ranks:  # the last bits of the numbers
        yield [KeyChange(key=("actor", "num_shards"), value=most_ranks)]
    elif spec.sums_shards_apart and actor.resolved_shards > num_ranks:
        yield [KeyChange(key=("actor", "num_shards"), value=num_ranks)]
    yield from _option_axes(
        ("actor", "backend_options"), spec.smaller(actor.backend_options, config.model.dtype, num_devices)
    )
    if spec.sums_shards_apart and most_ranks > 1:  # whole copies
        sharded = next(other.name for other in TRAINERS.specs() if other.shards_state)
        yield [KeyChange(key=("actor", "backend"), value=sharded)]
    yield from _engine_axes(config, job_shape(config))
    if config.model.dtype == "float32":  # precision
        yield [KeyChange(key=("model", "dtype"), value="bfloat16")]


def _engine_axes(config: ReasoningConfig, job: JobShape) -> Iterator[list[KeyChange]]:
    """What an engine may have otherwise."""
    rollout, spec = config.rollout, config.rollout.engine_spec
    yield from _option_axes(("rollout", "engine_options"), spec.smaller(rollout.engine_options, job))
    if not spec.cuts_models:
        return
    size = rollout.tensor_parallel_size  # what its devices send each other
    yield [KeyChange(key=("rollout", "tensor_parallel_size"), value=size << doublings) for doublings in (1, 2, 3)]
    if config.served_dtype == "float32":  # precision
        yield [KeyChange(key=("rollout", "dtype"), value="bfloat16")]


def _option_axes(section: Key, axes: Iterable[tuple[str, Sequence[Any]]]) -> Iterator[list[KeyChange]]:
    """Values of a plug-in's options."""
    for option, values in axes:
        if values:
            yield [KeyChange(key=(*section, option), value=value) for value in values]

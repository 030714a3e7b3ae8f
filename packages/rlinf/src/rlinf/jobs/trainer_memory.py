"""What the memory checks of all language-model jobs have in common: the shape of a model, the ranks of a trainer under
changed settings, which of its settings to try, and the message of a model that does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf.config.lora import LoraConfig
from rlinf.errors import UserError
from rlinf.hub import fetch_model, hub_name
from rlinf.planning.fitting import FittingChanges, Key, KeyChange
from rlinf.planning.memory import MemoryPool, versions_lines
from rlinf_sched import ProfileError, StagePlan
from rlinf_sched.derive import Adapter, ModelShape, resolve_model
from rlinf_workers.plugins import TRAINERS


def named_shape(path: Path, key: str = "model.path") -> ModelShape:
    """The shape of the model in a folder or on the Hub; a few public models are known without a network.

    Raises: ProfileError, and UserError for a name on the Hub that cannot be read.
    """
    name = hub_name(path)
    if name is None:
        return resolve_model(path if path.is_dir() else path.name)
    try:
        return resolve_model(name.repo.partition("/")[2])
    except ProfileError:
        return resolve_model(fetch_model(name, key, config_only=True))


def ranks_in_replicas(config: Any, size: int, num_devices: int) -> int:
    """Ranks of an actor whose replicas have so many: as many replicas as devices and shards allow."""
    return math.gcd(config.actor.resolved_shards, max(1, num_devices // size)) * size


def most_ranks(stage: StagePlan, most_shards: int) -> int:
    """The largest number of ranks that divides the trainer's devices, of at most `most_shards`."""
    room = min(len(stage.devices), most_shards)
    counts = (count for count in range(1, room + 1) if len(stage.devices) % count == 0)
    return max(stage.num_ranks, max(counts, default=1))


def trainer_stage(before: Any, changed: Any, stage: StagePlan) -> StagePlan:
    """The trainer's stage under a changed config: its ranks follow the size of its replicas and its shards."""
    num_ranks, size = stage.num_ranks, changed.replica_sizes.get("actor", 1)
    if size != before.replica_sizes.get("actor", 1):
        num_ranks = ranks_in_replicas(changed, size, len(stage.devices))
    elif changed.actor.resolved_shards > before.actor.resolved_shards:
        num_ranks = changed.actor.resolved_shards
    return replace(stage, num_ranks=num_ranks, num_ranks_per_replica=size)


def adapter_of(lora: LoraConfig | None) -> Adapter | None:
    """The size of an adapter."""
    return lora and Adapter(rank=lora.rank, targets=None if lora.targets == "all-linear" else lora.targets)


def trainer_axes(
    config: Any, micro_batch: str, num_ranks: int, most_ranks: int, num_devices: int
) -> Iterator[list[KeyChange]]:
    """Values of the trainer's keys to try, mild ones first; the keys in the order of what they cost.

    Args:
        micro_batch: the key of `actor` that bounds a padded pass.
        num_ranks: ranks of the trainer; `most_ranks` could be, on `num_devices`.
    """
    actor, spec = config.actor, config.actor.trainer_spec
    budget = actor.token_budget  # costs time alone
    key = ("actor", micro_batch if budget is None else "max_tokens_per_micro_batch")
    size = getattr(actor, micro_batch) if budget is None else budget
    if size > 1:
        yield [KeyChange(key=key, value=size >> halvings) for halvings in range(1, size.bit_length())]
    if most_ranks > num_ranks:  # the last bits of the numbers
        yield [KeyChange(key=("actor", "num_shards"), value=most_ranks)]
    elif spec.sums_shards_apart and actor.resolved_shards > num_ranks:
        yield [KeyChange(key=("actor", "num_shards"), value=num_ranks)]
    yield from option_axes(
        ("actor", "backend_options"), spec.smaller(actor.backend_options, config.model.dtype, num_devices)
    )
    if spec.sums_shards_apart and most_ranks > 1:  # whole copies
        sharded = next(other.name for other in TRAINERS.specs() if other.shards_state)
        yield [KeyChange(key=("actor", "backend"), value=sharded)]


def precision_axes(config: Any) -> Iterator[list[KeyChange]]:
    """A smaller dtype of the model."""
    if config.model.dtype == "float32":
        yield [KeyChange(key=("model", "dtype"), value="bfloat16")]


def option_axes(section: Key, axes: Iterable[tuple[str, Sequence[Any]]]) -> Iterator[list[KeyChange]]:
    """Values of a plug-in's options."""
    for option, values in axes:
        if values:
            yield [KeyChange(key=(*section, option), value=value) for value in values]


def hint_of(fits: Sequence[FittingChanges], nothing_fits: str) -> str:
    """The settings that fit, or what to do where none does."""
    return "any of these fits:\n" + "\n".join(f"  {fit.text}" for fit in fits) if fits else nothing_fits


def does_not_fit(shape: ModelShape, place: MemoryPool, hint: str) -> UserError:
    """The error of a model that needs more than the fullest place has."""
    lines = {f"{load.group} {load.peak / 2**30:.2f} ({load.memory.describe(load.num_items)})" for load in place.loads}
    lines |= set(versions_lines(place.loads))
    return UserError(
        f"model.path: {shape.name}, {shape.num_parameters / 1e9:.2f} billion parameters, does not fit: {place.needs} "
        f"about {place.needed_bytes / 2**30:.1f} GiB, and {place.name} has {place.has_bytes / 2**30:.1f}\n  - "
        + "\n  - ".join(sorted(lines)),
        hint=hint,
    )

"""Which settings would fit: changes of a recipe that are tried, not a list of advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from rlinf.config.reasoning import ReasoningConfig
from rlinf_sched.derive import JobShape
from rlinf_workers.plugins import TRAINERS

MOST_KEYS = 3
"""Keys that a suggestion changes at most."""
MOST_SHOWN = 4
Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyChange:
    """Another value of one key."""

    key: Key
    value: Any

    @property
    def text(self) -> str:
        """As on the command line."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"--{'.'.join(self.key)} {value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingChanges:
    """Changes with which a recipe fits."""

    changes: tuple[KeyChange, ...]
    needed_bytes: int

    @property
    def text(self) -> str:
        """The overrides, and what they leave."""
        return f"{' '.join(change.text for change in self.changes)}: {self.needed_bytes / 2**30:.1f} GiB"


def fitting_changes(
    config: ReasoningConfig,
    fitting: Callable[[ReasoningConfig], int | None],
    job: JobShape,
    *,
    num_ranks: int,
    most_ranks: int,
    num_devices: int,
) -> list[FittingChanges]:
    """The first few changes of as few keys as will do, the cheapest first.

    Args:
        fitting: bytes that a config needs where it needs most; None: it does not fit.
        job: what the config asks of a rank.
        num_ranks: ranks of the actor.
        most_ranks: as many as its devices could hold.
        num_devices: of the actor.
    """
    fits: list[FittingChanges] = []
    axes = list(_axes(config, job, num_ranks, most_ranks, num_devices))
    for num_keys in range(1, MOST_KEYS + 1):
        for chosen in combinations(axes, num_keys):
            keys = {axis[0].key for axis in chosen}
            if any(keys > {change.key for change in fit.changes} for fit in fits):
                continue  # fewer keys will do
            for changes in product(*chosen):
                changed = _changed(config, changes)
                if changed is not None and (size := fitting(changed)) is not None:
                    fits.append(FittingChanges(changes=changes, needed_bytes=size))
                    break
        if fits:
            break
    return fits[:MOST_SHOWN]


def hint_of(fits: list[FittingChanges]) -> str:
    """What a refusal says of them."""
    if not fits:
        return (
            "no other number of groups, precision or backend fits: use a smaller model, shorter sequences "
            "(rollout.max_new_tokens, rollout.max_prompt_tokens), stages for more ranks "
            "(actor.backend_options.pipeline_parallel of megatron), or devices with more memory"
        )
    return "any of these fits:\n" + "\n".join(f"  {fit.text}" for fit in fits)


def _axes(
    config: ReasoningConfig, job: JobShape, num_ranks: int, most_ranks: int, num_devices: int
) -> Iterator[list[KeyChange]]:
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
    yield from _engine_axes(config, job)
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


def _changed(config: ReasoningConfig, changes: tuple[KeyChange, ...]) -> ReasoningConfig | None:
    """The config with the changes; None where they contradict it."""
    for change in changes:
        config = _with(config, change.key, change.value)
    return None if any(True for _ in config.conflicts()) else config


def _with(section: Any, key: Key, value: Any) -> Any:
    first, *rest = key
    if isinstance(section, dict):
        return {**section, first: value}
    inner = getattr(section, first)
    return section.model_copy(update={first: _with(inner, tuple(rest), value) if rest else value})

"""Which settings would fit: changes of a recipe that are tried, not a list of advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from rlinf.config.reasoning import ReasoningConfig
from rlinf_sched.derive.memory.sglang import MEM_FRACTION

MOST_KEYS = 3
"""Keys that a suggestion changes at most."""
MOST_SHOWN = 4
OTHER_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Shares of a GPU that an engine may take; the nearest few are tried."""
MOST_SHARES = 4
CACHE_SHARES = (0.6, 0.4, 0.25, 0.2, 0.1, 0.05)
"""Shares of the free memory for a cache whose rows are refilled."""
Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Another value of one key."""

    key: Key
    value: Any

    @property
    def text(self) -> str:
        """As on the command line."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"--{'.'.join(self.key)} {value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Changes with which a recipe fits."""

    changes: tuple[Change, ...]
    needed_bytes: int

    @property
    def text(self) -> str:
        """The overrides, and what they leave."""
        return f"{' '.join(change.text for change in self.changes)}: {self.needed_bytes / 2**30:.1f} GiB"


def fitting_changes(
    config: ReasoningConfig,
    fitting: Callable[[ReasoningConfig], int | None],
    *,
    num_ranks: int,
    most_ranks: int,
    num_devices: int,
) -> list[Fit]:
    """The first few changes of as few keys as will do, the cheapest first.

    Args:
        fitting: bytes that a config needs where it needs most; None: it does not fit.
        num_ranks: ranks of the actor.
        most_ranks: as many as its devices could hold.
        num_devices: of the actor.
    """
    found: list[Fit] = []
    axes = list(_axes(config, num_ranks, most_ranks, num_devices))
    for num_keys in range(1, MOST_KEYS + 1):
        for chosen in combinations(axes, num_keys):
            keys = {axis[0].key for axis in chosen}
            if any(keys > {change.key for change in fit.changes} for fit in found):
                continue  # fewer keys will do
            for changes in product(*chosen):
                changed = _changed(config, changes)
                if changed is not None and (size := fitting(changed)) is not None:
                    found.append(Fit(changes=changes, needed_bytes=size))
                    break
        if found:
            break
    return found[:MOST_SHOWN]


def hint_of(fits: list[Fit]) -> str:
    """What a refusal says of them."""
    if not fits:
        return (
            "no other number of groups, precision or backend fits: use a smaller model, shorter sequences "
            "(rollout.max_new_tokens, rollout.max_prompt_tokens), stages for more ranks "
            "(actor.backend_options.pipeline_parallel of megatron), or devices with more memory"
        )
    return "any of these fits:\n" + "\n".join(f"  {fit.text}" for fit in fits)


def _axes(config: ReasoningConfig, num_ranks: int, most_ranks: int, num_devices: int) -> Iterator[list[Change]]:
    """Values of a key to try, mild ones first; the keys in the order of what they cost."""
    actor, options = config.actor, ("actor", "backend_options")
    budget = actor.max_tokens_per_micro_batch  # costs time alone
    key = ("actor", "micro_batch_groups" if budget is None else "max_tokens_per_micro_batch")
    size = actor.micro_batch_groups if budget is None else budget
    if size > 1:
        yield [Change(key=key, value=size >> halvings) for halvings in range(1, size.bit_length())]
    if most_ranks > num_ranks:  # the last bits of the numbers
        yield [Change(key=("actor", "num_shards"), value=most_ranks)]
    elif actor.backend == "replicated" and actor.settled_shards > num_ranks:
        yield [Change(key=("actor", "num_shards"), value=num_ranks)]
    if actor.backend in ("fsdp2", "megatron"):
        if not actor.backend_options.get("recompute"):  # time
            yield [Change(key=(*options, "recompute"), value=True)]
        if actor.backend_options.get("compute_dtype") != "bfloat16" and config.model.dtype == "float32":
            yield [Change(key=(*options, "compute_dtype"), value="bfloat16")]
    if actor.backend == "megatron":  # what ranks send each other
        for name in ("tensor_parallel", "expert_parallel"):
            size = int(actor.backend_options.get(name, 1))
            larger = [size << doublings for doublings in range(1, (num_devices // size).bit_length())]
            if larger:
                yield [Change(key=(*options, name), value=value) for value in larger]
    elif actor.backend == "replicated" and most_ranks > 1:
        yield [Change(key=("actor", "backend"), value="fsdp2")]
    yield from _engine_axes(config)
    if config.model.dtype == "float32":  # precision
        yield [Change(key=("model", "dtype"), value="bfloat16")]


def _engine_axes(config: ReasoningConfig) -> Iterator[list[Change]]:
    """What an SGLang engine may have otherwise, or a cache whose rows are refilled."""
    rollout, options = config.rollout, ("rollout", "sglang")
    if rollout.engine == "huggingface" and rollout.engine_options.get("refill") is True:  # waiting completions
        most = float(rollout.engine_options.get("cache_share", 1.0))
        key = ("rollout", "engine_options", "cache_share")
        if smaller := [share for share in CACHE_SHARES if share < most]:
            yield [Change(key=key, value=share) for share in smaller]
    if rollout.engine != "sglang":
        return
    tokens, needed = rollout.sglang.get("max_total_tokens"), rollout.max_prompt_tokens + rollout.max_new_tokens
    if isinstance(tokens, int) and tokens > needed:  # waiting completions
        yield [Change(key=(*options, "max_total_tokens"), value=max(needed, tokens >> n)) for n in range(1, 6)]
    given = rollout.sglang.get("mem_fraction_static")
    share = float(given) if isinstance(given, int | float) else MEM_FRACTION
    near = sorted((other for other in OTHER_SHARES if other != share), key=lambda other: abs(other - share))
    yield [Change(key=(*options, "mem_fraction_static"), value=other) for other in near[:MOST_SHARES]]
    size = rollout.tensor_parallel_size  # what its devices send each other
    yield [Change(key=("rollout", "tensor_parallel_size"), value=size << doublings) for doublings in (1, 2, 3)]
    if config.served_dtype == "float32":  # precision
        yield [Change(key=("rollout", "dtype"), value="bfloat16")]


def _changed(config: ReasoningConfig, changes: tuple[Change, ...]) -> ReasoningConfig | None:
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

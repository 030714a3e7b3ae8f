"""What specs of engines in front of a server share: continuous batching in a paged KV cache that is allocated when the
engine starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_workers.engines.server_arguments import ServerArguments
from rlinf_workers.engines.spec import EngineSpec

if TYPE_CHECKING:
    from rlinf_sched import StageProfile
    from rlinf_sched.derive import Gpu, JobShape, ModelShape

OTHER_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Suggested GPU memory fractions; the nearest few are tried."""
MAX_SHARES = 4
MAX_HALVINGS = 5
"""Of a size that a recipe sets, if it does not fit."""


@dataclass(frozen=True, kw_only=True)
class ServedSpec(EngineSpec):
    """An engine whose completions run in a server's processes, as many at once as its KV cache holds."""

    arguments: ServerArguments
    share_option: str
    """The argument with the fraction of a GPU that it takes."""
    default_share: float
    length_options: tuple[str, ...]
    """Arguments that limit the tokens of a sequence."""

    def kv_tokens(self, model: ModelShape, job: JobShape) -> int:
        """Capacity of an engine's KV cache in tokens; 0 or less if the weights leave no memory."""
        raise NotImplementedError

    def max_running(self, job: JobShape) -> int | None:
        """Its limit of running completions; None: all that there are."""
        raise NotImplementedError

    def keep_problem(self, options: Mapping[str, Any]) -> str | None:
        """Why completions without stop strings cannot keep their KV cache when new weights arrive, and what to set."""
        raise NotImplementedError

    def problems(self, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        return self.arguments.problems(options)

    def length_problems(self, options: Mapping[str, Any], num_tokens: int) -> Iterator[tuple[str, str]]:
        for option in self.length_options:
            value = options.get(option)
            if isinstance(value, int) and 0 < value < num_tokens:
                yield option, f"={value}"

    def devices_per_rank(self, tensor_parallel_size: int) -> int:
        return tensor_parallel_size

    def profile(self, model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
        from rlinf_workers.engines.served_profile import served_profile

        memory, num_tokens = self.memory(model, job), self.kv_tokens(model, job)
        title, max_running = self.arguments.title, self.max_running(job)
        return served_profile(title, model, gpu, job, memory, num_tokens=num_tokens, max_running=max_running)

    def fills_its_memory(self, options: Mapping[str, Any]) -> bool:
        return True

    def shortage(self, model: ModelShape, job: JobShape) -> str | None:
        from rlinf_workers.engines.served_profile import kv_token_bytes

        num_tokens, needed = self.kv_tokens(model, job), job.longest_tokens
        if num_tokens >= needed:
            return None
        size, share = job.tensor_parallel, job.engine_options.get(self.share_option)
        weights, pool = self.memory(model, job).weights, needed * kv_token_bytes(model, job)
        return (
            f"the KV cache of an engine on {size} device{'s' if size > 1 else ''} would hold {max(0, num_tokens):,} "
            f"tokens, and the longest sequence has {needed:,} ({pool / 2**30:.2f} GiB on each device, beside "
            f"{weights / 2**30:.2f} of weights; a device has {job.device_bytes / 2**30:.1f}"
            + (f", {self.share_option}={share})" if share else ")")
        )

    def near_shares(self, options: Mapping[str, Any]) -> list[float]:
        """GPU memory fractions beside that of the options, the nearest first."""
        chosen = options.get(self.share_option)
        share = float(chosen) if isinstance(chosen, int | float) else self.default_share
        others = [other for other in OTHER_SHARES if other != share]
        return sorted(others, key=lambda other: abs(other - share))[:MAX_SHARES]

    def new_weights_problem(self, options: Mapping[str, Any], on_new_weights: str, *, has_stop: bool) -> str | None:
        if on_new_weights == "finish":
            return None
        if has_stop:
            return (
                f"{self.arguments.title} does not report which weights sampled the tokens of a completion that ends at "
                "a stop string; use finish, or no stop strings"
            )
        return self.keep_problem(options) if on_new_weights == "keep" else None

    def late_groups_problem(self, options: Mapping[str, Any]) -> str | None:
        return None  # abort hands back what it has of a completion

    def episodes_problem(self, options: Mapping[str, Any]) -> str | None:
        return None

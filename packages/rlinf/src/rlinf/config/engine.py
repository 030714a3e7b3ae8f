"""Config of the engine: the same keys in a recipe's section `rollout` and in `rlinf eval`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from rlinf.config.base import Conflict, Section
from rlinf_workers.engines import EngineSpec
from rlinf_workers.plugins import ENGINES


class EngineConfig(Section):
    """The engine of a rollout."""

    AT: ClassVar[str]
    """Prefix of the keys in messages: "rollout." or nothing."""

    engine: str = Field(
        default="huggingface",
        description="What generates completions: huggingface, sglang (docs/sglang.md), or package.module:Class of a "
        "custom engine (docs/plugins/engine.md).",
    )
    engine_options: dict[str, bool | int | float | str | list[int | float | str]] = Field(
        default={},
        description="Options of the engine: cuda_graphs, refill and cache_share of huggingface; SGLang's server "
        "arguments by its own names, such as mem_fraction_static (docs/sglang.md); or those of a custom engine.",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Devices over which an engine shards the model; each rollout rank has this many."
    )

    @property
    def engine_spec(self) -> EngineSpec:
        """The spec of the engine; the defaults if the engine does not exist, which `check_names` reports."""
        return ENGINES.spec_if_there(self.engine)

    @property
    def devices_per_rank(self) -> int:
        """Devices of a rank, as in rlinf_sched.flow_graph.Stage."""
        return self.engine_spec.devices_per_rank(self.tensor_parallel_size)

    def conflicts(self) -> Iterator[Conflict]:
        at, spec = self.AT, self.engine_spec
        if self.tensor_parallel_size > 1 and not spec.cuts_models:
            yield Conflict(
                keys=(f"{at}tensor_parallel_size", f"{at}engine"),
                text=f"={self.tensor_parallel_size}: {at}engine={self.engine} computes on one device; use 1, or "
                "another engine",
            )
        for option, text in spec.problems(self.engine_options):
            yield Conflict(keys=(f"{at}engine_options.{option}", f"{at}engine"), text=text)

    def length_conflicts(self, num_tokens: int, what: str) -> Iterator[Conflict]:
        """Yields the engine options that are too small for sequences of `num_tokens` tokens; `what` names the
        sequence."""
        for option, text in self.engine_spec.length_problems(self.engine_options, num_tokens):
            yield Conflict(
                keys=(f"{self.AT}engine_options.{option}",),
                text=f"{text} is less than {what} = {num_tokens}; use at least {num_tokens}",
            )

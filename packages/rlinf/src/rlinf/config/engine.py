"""What samples completions, and with what settings: the same keys in a recipe's `rollout` and in `rlinf eval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from rlinf.config.base import Conflict, Section

SGLANG_ARGUMENTS = Path(__file__).with_name("sglang_arguments.txt")
"""Names of the server arguments of SGLang 0.5.23, so that a machine without SGLang finds a mistake too."""


class EngineConfig(Section):
    """The engine of a rollout."""

    AT: ClassVar[str]
    """What the keys begin with: "rollout.", or nothing."""

    engine: str = Field(
        default="huggingface",
        description="What samples completions: huggingface, sglang (docs/sglang.md), or package.module:Class of one's "
        "own (docs/doors/engine.md).",
    )
    engine_options: dict[str, bool | int | float | str] = Field(
        default={}, description="Further arguments of an engine of one's own."
    )
    sglang: dict[str, bool | int | float | str | list[int | float | str]] = Field(
        default={},
        description="Server arguments of SGLang, by its own names: mem_fraction_static, max_total_tokens, "
        "attention_backend, ... (docs/sglang.md).",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Devices over which an engine cuts the model: those of a rank of the rollout."
    )

    @property
    def devices_per_rank(self) -> int:
        """As in rlinf_sched.flow_graph.Stage: an engine of this system computes on one device."""
        return self.tensor_parallel_size if self.engine == "sglang" or self.tensor_parallel_size > 1 else 0

    @property
    def options(self) -> Mapping[str, object]:
        """What the recipe gives the engine's constructor."""
        return self.sglang if self.engine == "sglang" else self.engine_options

    def conflicts(self) -> Iterator[Conflict]:
        at, engine = self.AT, f"{self.AT}engine"
        if self.sglang and self.engine != "sglang":
            key = f"{at}sglang.{next(iter(self.sglang))}"
            yield Conflict(
                keys=(key, engine), text=f" is set, but {engine}={self.engine}; use {engine}=sglang, or leave it out"
            )
            return
        if self.tensor_parallel_size > 1 and self.engine == "huggingface":
            yield Conflict(
                keys=(f"{at}tensor_parallel_size", engine),
                text=f"={self.tensor_parallel_size}: {engine}=huggingface computes on one device; use {engine}=sglang, "
                "or 1",
            )
        share = self.engine_options.get("cache_share", 1)
        is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
        if self.engine == "huggingface" and not is_share:
            key = f"{at}engine_options.cache_share"
            yield Conflict(keys=(key,), text=f"={share!r} is no share; use a number above 0 and up to 1")
        if self.engine == "sglang":
            yield from self._sglang_conflicts()

    def _sglang_conflicts(self) -> Iterator[Conflict]:
        at = self.AT
        if self.engine_options:
            yield Conflict(
                keys=(f"{at}engine_options", f"{at}engine"),
                text=f": {at}engine=sglang has its settings under {at}sglang; put them there",
            )
        # imports numpy, as options of megatron do
        from rlinf_sched.derive.sglang import OWNED, WHERE, SGLangOptions, unknown_argument

        for key in (key for key in self.sglang if key in OWNED):
            yield Conflict(keys=(f"{at}sglang.{key}",), text=f" cannot be set: {OWNED[key]}; leave it out")
        if not self.sglang.get("any_version"):
            known = {"any_version", *SGLANG_ARGUMENTS.read_text(encoding="utf-8").split()}
            for key in (key for key in self.sglang if key not in known):
                yield Conflict(keys=(f"{at}sglang.{key}",), text=unknown_argument(key, known))
        try:
            SGLangOptions.of(self.sglang)
        except ValueError as error:
            key, _, text = str(error).removeprefix(f"{WHERE}.").partition("=")
            yield Conflict(keys=(f"{at}sglang.{key}",), text=f"={text}")

    def length_conflicts(self, num_tokens: int, what: str) -> Iterator[Conflict]:
        """What is too small for a sequence of so many tokens; `what` says which."""
        for key in ("max_total_tokens", "context_length"):
            value = self.sglang.get(key)
            if self.engine == "sglang" and isinstance(value, int) and 0 < value < num_tokens:
                yield Conflict(
                    keys=(f"{self.AT}sglang.{key}",),
                    text=f"={value} is less than {what} = {num_tokens}; use at least {num_tokens}",
                )

"""One `AsyncLLM` of vLLM, which marks an engine whose process died as dead, without telling how it ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from rlinf_workers.engines.server_loop import ServerLoop
from rlinf_workers.engines.vllm.child import FOLDER_VARIABLE, run_engine_core
from rlinf_workers.engines.vllm.tiles import know_largest_picture
from rlinf_workers.errors import WorkersError
from rlinf_workers.leftovers import SweptFolder

END_S = 5.0
"""Time for vLLM's processes to end by themselves; then they are killed."""


class VLLMServer(ServerLoop):
    """A running `AsyncLLM`."""

    TITLE = "vLLM"
    HINTS: ClassVar[Mapping[str, str]] = {
        "No available memory for the cache blocks": "raise engine_options.gpu_memory_utilization",
        "Available memory on node": "lower engine_options.kv_cache_memory_bytes",
        "is not divisible by": "lower rollout.tensor_parallel_size; if it is the vision tower that cannot be sharded, "
        "engine_options.mm_encoder_tp_mode=data keeps it whole on each device",
        "max_model_len": "raise engine_options.gpu_memory_utilization, or kv_cache_memory_bytes on CPU slots",
    }
    STARTS_OTHERS = True

    def __init__(
        self, arguments: Mapping[str, Any], folder: SweptFolder, on_lost: Callable[[WorkersError], None]
    ) -> None:
        os.environ[FOLDER_VARIABLE] = str(folder.path)
        super().__init__(arguments, folder, on_lost)
        config = self.engine.vllm_config
        # One block is never used: entries of sequences without a block point at it.
        self.num_tokens = (config.cache_config.num_gpu_blocks - 1) * config.cache_config.block_size
        self.num_sequence_tokens = int(config.model_config.max_model_len)

    def _name_of(self, process: Any) -> str:
        return "core process"  # it also ends when one of its workers does, after it has logged which one

    async def _start(self, arguments: Mapping[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        know_largest_picture()
        with _own_core_process():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        try:
            await engine.collective_rpc("rlinf_prepare")
        except Exception:
            engine.shutdown(timeout=END_S)
            raise
        return engine

    async def _stop(self) -> None:
        self.engine.shutdown(timeout=END_S)


@contextlib.contextmanager
def _own_core_process() -> Iterator[None]:
    """vLLM starts its core process at `child.run_engine_core`; it has no argument for the function to start."""
    from vllm.v1.engine.core import EngineCoreProc  # pyright: ignore[reportMissingImports]

    before = EngineCoreProc.__dict__["run_engine_core"]
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = before

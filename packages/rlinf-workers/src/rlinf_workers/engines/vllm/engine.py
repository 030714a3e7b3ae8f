"""vLLM behind the protocol of generation engines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.engines.base import UnfinishedCompletion
from rlinf_workers.engines.completions import ServerAnswer
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.engines.server_processes import last_error
from rlinf_workers.engines.serving import STOP_INTERVAL, ServingEngine, api_of, bound_cores, check_version
from rlinf_workers.engines.vllm.arguments import Argument, engine_arguments, env_vars
from rlinf_workers.engines.vllm.requests import PIXELS, answer_of, prompt_input, request_parameters
from rlinf_workers.engines.vllm.server import VLLMServer
from rlinf_workers.engines.vllm.spec import SPEC
from rlinf_workers.errors import SettingsRefused, WorkersError
from rlinf_workers.models.language_model import ModelSettings

LOOK_INTERVAL_S, NUM_LOOKS = 0.01, 500
"""While the engine waits to learn how a process of vLLM ended."""
NUM_ATTEMPTS = 3
"""Of a request with pictures: the core process may have dropped one whose pixels were left out, and then gets them."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on a CPU (0.32.0, v1/attention/backends/cpu_attn.py); another ends its process."""
ARCHITECTURES = (
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM"),
    *("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"),
    *("Qwen3VLMoeForConditionalGeneration", "SmolVLMForConditionalGeneration"),
)
"""Models whose parameters were compared with a layout, and whose tokens with those of transformers."""


class VLLMEngine(ServingEngine):
    """A GenerationEngine that samples with vLLM, with one process per device of the rank and one that schedules.

    Requests are accepted while others run. The number in flight is bounded by the KV cache as vLLM reports it, and by
    `max_batch_sequences` if given. Each completion has its own seed from seed, step, index and member, so its noise
    does not depend on its batch. The logits of a batch may differ by rounding from those of another, so equal numbers
    are not guaranteed.

    Args:
        devices: names of the rank's devices, one per tensor-parallel process; empty: only `device`.
        any_version: accept a vLLM version that was not tested.
        arguments: engine arguments of vLLM.
    """

    SPEC = SPEC
    CHECKS_WAKES = PAUSES_ASLEEP = DROPS_WEIGHTS = True
    CACHE_OPTIONS = "engine_options.gpu_memory_utilization, or kv_cache_memory_bytes on CPU slots"

    def __init__(
        self,
        model: ModelSettings,
        device: torch.device,
        *,
        max_prompt_tokens: int | None,
        max_batch_sequences: int | None = None,
        devices: Sequence[str] = (),
        any_version: bool = False,
        **arguments: Argument,
    ) -> None:
        devices = devices or (str(device),)
        SPEC.arguments.check(arguments, known_arguments(device, devices, any_version=any_version))
        num_devices = len(devices)
        self._prepare(model, device, max_prompt_tokens=max_prompt_tokens, num_devices=num_devices, options=arguments)
        folder = self._model.folder
        config = json.loads(Path(folder, "config.json").read_text())
        check_architecture(config, device)
        self._sees = config.get("model_type") in SPEC.picture_models
        self._placeholders = {kind: config.get(f"{kind}_token_id") for kind in PIXELS}
        self._numbers = itertools.count()
        self._request_ids: set[str] = set()
        """Of the requests in flight."""
        whole = engine_arguments(
            model,
            device,
            num_devices=num_devices,
            folder=folder,
            model_type=config.get("model_type"),
            has_pictures=self._sees,
            engine_options=arguments,
        )
        self._serve(lambda: VLLMServer(whole, self._folder, self._on_lost), device, max_batch_sequences)

    # -- in the server's loop ---------------------------------------------------------------------------------------

    async def _answers(
        self, request: UnfinishedCompletion, sampling: SamplingSettings, before: Tensor | None, *, streams: bool
    ) -> AsyncGenerator[ServerAnswer, None]:
        from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
            RequestOutputKind,
            SamplingParams,
        )

        prompt_ids = [*request.prompt.token_ids.tolist(), *request.token_ids.tolist()]
        parameters = request_parameters(request, sampling, self._stop_ids)
        parameters["output_kind"] = RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY
        if streams:
            parameters["stream_interval"] = STOP_INTERVAL
        has_pictures = request.prompt.pictures is not None
        for attempts_left in reversed(range(NUM_ATTEMPTS)):
            request_id = str(next(self._numbers))
            self._request_ids.add(request_id)
            prompt, is_lost = prompt_input(request.prompt, prompt_ids, self._placeholders), False
            if has_pictures:  # leaves out the pixels of pictures that the core process has
                self._server.engine.input_processor.inject_into_mm_cache(prompt["mm_hashes"], prompt["mm_kwargs"])
            outputs = self._server.engine.generate(prompt, SamplingParams(**parameters), request_id)
            try:
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        is_lost = has_pictures and attempts_left > 0 and output.outputs[0].finish_reason == "error"
                        if not is_lost:
                            yield answer_of(output.outputs[0])
            except Exception as error:
                raise await self._explained(error) from error
            finally:
                self._request_ids.discard(request_id)
            if not is_lost:
                return

    async def _explained(self, error: Exception) -> Exception:
        """The error that names the process which ended, where vLLM only says that the engine is dead. On a busy machine
        its core process takes long to end; what it logged last is there."""
        from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

        if not isinstance(error, EngineDeadError):
            return error
        for _ in range(NUM_LOOKS):
            if self._lost is not None:
                return self._lost
            await asyncio.sleep(LOOK_INTERVAL_S)
        return WorkersError(f"vLLM's core process has failed: {last_error(self._folder.path) or error}")

    def _abort_requests(self) -> None:
        self._server.spawn(self._server.engine.abort(list(self._request_ids)))

    async def _enter(self, ticket: str) -> None:
        await self._server.engine.collective_rpc("rlinf_enter", args=(ticket,))

    async def _begin_version(self, policy_version: int, *, pauses: bool = False, drops: bool = True) -> None:
        if pauses:
            await self._pause()
        if drops and not await self._server.engine.reset_prefix_cache(reset_running_requests=True):
            raise WorkersError("vLLM did not drop its caches of earlier weights")
        if self._sees:
            await self._server.engine.reset_encoder_cache()
        await self._server.engine.update_weight_version(str(policy_version))
        if pauses:
            await self._continue()

    async def _pause(self, *, keeps: bool = False) -> None:
        """Without `keeps`, running requests return to the waiting queue without their KV cache."""
        await self._server.engine.pause_generation(mode="keep", clear_cache=not keeps)

    async def _continue(self) -> None:
        if self._is_away and self._gives_memory_back:
            await self._server.engine.wake_up()
        await self._server.engine.resume_generation()

    async def _release(self, *, pauses: bool, drops: bool = False) -> None:
        """vLLM keeps a copy of the weights in host memory, or of the module's buffers alone, and pauses requests in
        flight by itself."""
        await self._server.engine.sleep(level=2 if drops else 1, mode="keep")

    async def _resume(self) -> None:
        """Only the weights: vLLM computes no request before `_continue` has brought back the rest, too."""
        await self._server.engine.wake_up(["weights"])


def known_arguments(device: torch.device, devices: Sequence[str], *, any_version: bool) -> list[str]:
    """Imports vLLM as the devices require; returns the names of its engine arguments.

    Raises: SettingsRefused if it is not installed, or in an untested version.
    """
    check_version(SPEC, any_version=any_version)
    cores = bound_cores(devices, sorted(os.sched_getaffinity(0)))
    os.environ.update(env_vars(device, cores))
    with api_of(SPEC):
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401  # pyright: ignore[reportMissingImports]

        return [field.name for field in fields(AsyncEngineArgs)]


def check_architecture(config: Mapping[str, Any], device: torch.device) -> None:
    """Checks that a model is one whose weights were tried in vLLM, with heads that its kernels compute.

    Args:
        config: its config.json.

    Raises: SettingsRefused.
    """
    names = config.get("architectures") or ["None"]
    if names[0] not in ARCHITECTURES:
        raise SettingsRefused(
            f"the engine vllm has not been tried with {names[0]} (architectures in config.json of the model); it "
            f"serves {', '.join(ARCHITECTURES)}; use the engine huggingface or sglang"
        )
    text = config.get("text_config") or config
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if device.type == "cpu" and width not in CPU_HEADS:
        raise SettingsRefused(
            f"vLLM's attention on CPU slots computes heads of {', '.join(map(str, CPU_HEADS))} numbers, and those of "
            f"the model have {width}; use another model, or the engine huggingface"
        )

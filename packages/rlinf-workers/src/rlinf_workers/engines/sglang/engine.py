"""SGLang behind the protocol of generation engines."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.engines.base import UnfinishedCompletion
from rlinf_workers.engines.completions import Completion, ServerAnswer
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.engines.serving import STOP_INTERVAL, ServingEngine, api_of, bound_cores, check_version
from rlinf_workers.engines.sglang.arguments import Argument, fraction_of, server_arguments
from rlinf_workers.engines.sglang.experts import ExpertRows
from rlinf_workers.engines.sglang.loader import LOADER
from rlinf_workers.engines.sglang.requests import answer_of, request_parameters
from rlinf_workers.engines.sglang.server import EngineServer
from rlinf_workers.engines.sglang.spec import SPEC
from rlinf_workers.errors import SettingsRefused, WorkersError
from rlinf_workers.gpu_memory import free_gpu_bytes
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.roles.records.language import Prompt

IDLE_S = 3600.0
"""Time limit of SGLang for its scheduler to become idle. The deadline of the step, which follows from predicted and
measured times, passes before."""


class SGLangEngine(ServingEngine):
    """A GenerationEngine that samples with SGLang, with one process per device of the rank.

    Requests are accepted while others run. The number in flight is bounded by the KV cache as SGLang reports it, and by
    `max_batch_sequences` if given. Equal numbers are not guaranteed: batches depend on timing, and SGLang samples from
    one generator. With the server argument `enable_deterministic_inference` (GPUs), each completion has its own seed
    from seed, step, index and member, and SGLang guarantees the same tokens in any batch.

    Args:
        devices: names of the rank's devices, one per tensor-parallel process; empty: only `device`.
        any_version: accept an SGLang version that was not tested.
        static_bytes: weights and KV pool on a GPU, from which `mem_fraction_static` follows if it is not given.
        server: server arguments of SGLang.
    """

    SPEC = SPEC
    CACHE_OPTIONS = "engine_options.mem_fraction_static, or max_total_tokens on CPU slots"

    def __init__(
        self,
        model: ModelSettings,
        device: torch.device,
        *,
        max_prompt_tokens: int | None,
        max_batch_sequences: int | None = None,
        devices: Sequence[str] = (),
        any_version: bool = False,
        static_bytes: int | None = None,
        **server: Argument,
    ) -> None:
        SPEC.arguments.check(server, known_arguments(device, devices, any_version=any_version))
        num_devices = max(1, len(devices))
        self._prepare(model, device, max_prompt_tokens=max_prompt_tokens, num_devices=num_devices, options=server)
        config = check_architecture(Path(self._model.folder))
        self._expert_rows = ExpertRows.of(config) if server.get("enable_return_routed_experts") else None
        arguments = server_arguments(
            model,
            device,
            num_devices=num_devices,
            folder=self._model.folder,
            loader=LOADER,
            stop_token_ids=self._stop_ids,
            engine_options=server,
            static_fraction=self._static_fraction(static_bytes),
        )
        self._backs_weights_up = bool(arguments.get("enable_weights_cpu_backup"))
        self._serve(
            lambda: EngineServer(arguments, self._folder, self._on_lost, model.adapter), device, max_batch_sequences
        )
        self._note_small_pool()

    def _static_fraction(self, static_bytes: int | None) -> float | None:
        if static_bytes is None:
            return None
        return fraction_of(static_bytes, free_gpu_bytes(range(self._num_devices)))

    def _note_small_pool(self) -> None:
        """SGLang allocates a smaller pool than planned, without an error, if others hold memory of the device."""
        planned = self._options.get("max_total_tokens")
        if isinstance(planned, int) and self._server.num_tokens < planned:
            print(
                f"note: the KV cache of the engine holds {self._server.num_tokens:,} of {planned:,} planned tokens: "
                "other processes had memory of its device when it started, so some completions wait for others",
                file=sys.stderr,
                flush=True,
            )

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int, step: int) -> None:
        if sampling.records_experts and self._expert_rows is None:
            raise ValueError("records_experts: engine_options.enable_return_routed_experts is not true")
        super().submit(prompts, sampling, seed=seed, step=step)

    # -- in the engine's loop ---------------------------------------------------------------------------------------

    async def _prefill(self, prompt: Prompt, sampling: SamplingSettings) -> Tensor | None:
        prompt_ids, rows = prompt.token_ids.tolist(), self._expert_rows if sampling.records_experts else None
        output = await self._server.engine.async_generate(
            input_ids=prompt_ids,
            image_data=_image_data(prompt),
            sampling_params={"max_new_tokens": 0},
            return_routed_experts=rows is not None,
        )
        return None if rows is None else rows.read(answer_of(output).experts, len(prompt_ids) - 1)

    async def _answers(
        self, request: UnfinishedCompletion, sampling: SamplingSettings, before: Tensor | None, *, streams: bool
    ) -> AsyncGenerator[ServerAnswer, None]:
        arguments = {
            "input_ids": [*request.prompt.token_ids.tolist(), *request.token_ids.tolist()],
            "image_data": _image_data(request.prompt),
            "sampling_params": request_parameters(request, sampling, self._stop_ids),
            "return_logprob": True,
        }
        if sampling.records_experts:
            arguments |= {
                "return_routed_experts": True,
                "routed_experts_start_len": 0 if before is None else len(before),
            }
        if not streams:
            yield answer_of(await self._server.engine.async_generate(**arguments))
            return
        arguments["sampling_params"]["stream_interval"] = STOP_INTERVAL
        async with contextlib.aclosing(await self._server.engine.async_generate(**arguments, stream=True)) as outputs:
            async for output in outputs:
                yield answer_of(output)

    def _with_experts(
        self, completion: Completion, answer: ServerAnswer, num_prompt_tokens: int, before: Tensor | None
    ) -> Completion:
        """Adds the experts of its prompt, and of all its tokens but the last."""
        assert self._expert_rows is not None, "refused by submit"
        num_before = 0 if before is None else len(before)
        rows = self._expert_rows.read(answer.experts, num_prompt_tokens + len(completion.token_ids) - 1 - num_before)
        experts = rows if before is None else torch.cat([before, rows])
        return replace(completion, prompt_experts=experts[:num_prompt_tokens], experts=experts[num_prompt_tokens:])

    def _abort_requests(self) -> None:
        """SGLang computes one more token of requests that run. If it had moved one back to its queue for lack of
        memory, some of its tokens are lost and sampled again."""
        self._server.manager.abort_request(abort_all=True)

    async def _enter(self, ticket: str) -> None:
        """Runs the weight loader, with the ticket as the name of an empty tensor."""
        from rlinf_workers.engines.sglang import srt

        manager = self._server.manager
        tensors = [
            srt.MultiprocessingSerializer.serialize([(ticket, torch.empty(0))]) for _ in range(self._num_devices)
        ]
        for method, request in (
            (manager.begin_weight_update, srt.BeginWeightUpdateReqInput(selector="all")),
            (
                manager.update_weights_from_tensor,
                srt.UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=tensors, load_format=LOADER, flush_cache=self._on_new_weights != "keep"
                ),
            ),
            (manager.end_weight_update, srt.EndWeightUpdateReqInput()),
        ):
            succeeded, message, *_ = await method(request, None)
            if not succeeded:
                raise WorkersError(f"SGLang refused to run the weight loader: {message}")

    async def _begin_version(self, policy_version: int, *, pauses: bool = False, drops: bool = True) -> None:
        from rlinf_workers.engines.sglang import srt

        if pauses:
            await self._pause()
        if drops:
            await self._flush_caches(is_paused=pauses or self._on_new_weights is not None)
        version = srt.UpdateWeightVersionReqInput(new_version=str(policy_version), abort_all_requests=False)
        await self._server.manager.update_weight_version(version)
        if pauses:
            await self._continue()

    async def _flush_caches(self, *, is_paused: bool) -> None:
        """Drops what earlier weights computed. A paused scheduler does so at once, if its requests were retracted; one
        that waited until it is idle would wait for them, too."""
        timeout_s = 0.0 if is_paused else IDLE_S  # a request that ended at a stop string may still be running
        answer = await self._server.manager.flush_cache(timeout_s=timeout_s)
        if not answer.success:
            raise WorkersError(f"SGLang did not drop its caches of earlier weights: {answer.message}")

    async def _release(self, *, pauses: bool, drops: bool = False) -> None:
        from rlinf_workers.engines.sglang import srt

        if pauses:
            await self._pause()
        await self._flush_caches(is_paused=pauses)
        await self._server.manager.release_memory_occupation(srt.ReleaseMemoryOccupationReqInput())

    async def _resume(self) -> None:
        from rlinf_workers.engines.sglang import srt

        await self._server.manager.resume_memory_occupation(srt.ResumeMemoryOccupationReqInput())

    async def _pause(self, *, keeps: bool = False) -> None:
        """With `retract`, running requests return to the waiting queue without their KV cache; with `in_place` they
        keep it. A paused scheduler uses a whole core, so it is paused only if requests are in flight."""
        from rlinf_workers.engines.sglang import srt

        mode = "in_place" if keeps else "retract"
        await self._server.manager.pause_generation(srt.PauseGenerationReqInput(mode=mode))

    async def _continue(self) -> None:
        from rlinf_workers.engines.sglang import srt

        await self._server.manager.continue_generation(srt.ContinueGenerationReqInput())


def _image_data(prompt: Prompt) -> list[Prompt] | None:
    """What `processors.ready` reads of a request."""
    return None if prompt.pictures is None else [prompt]


def known_arguments(device: torch.device, devices: Sequence[str], *, any_version: bool) -> list[str]:
    """Imports SGLang as the devices require; returns the names of its server arguments.

    Raises: SettingsRefused if it is not installed, or in an untested version.
    """
    check_version(SPEC, any_version=any_version)
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if device.type == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        if len(devices) > 1:
            cores = sorted(os.sched_getaffinity(0))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound_cores(devices, cores))
    with api_of(SPEC):
        from rlinf_workers.engines.sglang import srt

        return list(srt.ServerArgs.__struct_fields__)


def check_architecture(folder: Path) -> Mapping[str, Any]:
    """Checks that SGLang has its own implementation of a model. It would serve others through transformers, with
    parameters in other places; this searches its sources for the name, without importing them.

    Returns: the model's config.
    Raises: SettingsRefused.
    """
    config = json.loads((folder / "config.json").read_text())
    names = config.get("architectures") or ["None"]
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations, "its version was read before"
    sources = Path(spec.submodule_search_locations[0], "srt", "models").rglob("*.py")
    if not any(re.search(rf"\b{re.escape(names[0])}\b", path.read_text()) for path in sources):
        raise SettingsRefused(
            f"SGLang does not implement {names[0]} (architectures in config.json of the model); use "
            "the engine huggingface, or a model that it implements"
        )
    return config

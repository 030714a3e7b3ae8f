"""SGLang behind the protocol of generation engines."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import queue
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_comm.weights import Layout
from rlinf_workers.engines.base import Completions
from rlinf_workers.engines.processes import EngineProcesses
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.engines.sglang.arguments import (
    Argument,
    bound_cores,
    check_names,
    server_arguments,
    suspects,
)
from rlinf_workers.engines.sglang.capacity import Capacity
from rlinf_workers.engines.sglang.loader import LOADER
from rlinf_workers.engines.sglang.requests import Completion, answer_of, completions_of, cut_at, request_parameters
from rlinf_workers.engines.sglang.server import EngineServer
from rlinf_workers.engines.sglang.spec import SPEC
from rlinf_workers.engines.stopping import StopStrings
from rlinf_workers.errors import SettingsRefused, WorkersError
from rlinf_workers.leftovers import SweptFolder
from rlinf_workers.models.language_model import (
    ModelSettings,
    build_model,
    describe_model,
    is_adapter,
    load_tokenizer,
    stop_token_ids,
)
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.weight_sync.base import WeightPort, WeightReceiver

STOP_INTERVAL = 8
"""Tokens between two checks for a stop string: each is a message from the scheduler, and at most this many tokens are
computed in vain."""
IDLE_S = 60.0
"""Time limit for a scheduler to finish a command."""
LOST_S = 1.0
"""Time within which the stage notices a dead process of the engine."""


class SGLangEngine:
    """A GenerationEngine that samples with SGLang, with one process per device of the rank.

    Requests are accepted while others run. The number in flight is bounded by the KV cache as SGLang reports it, and by
    `max_batch_sequences` if given. Equal numbers are not guaranteed: batches depend on timing, and SGLang samples from
    one generator. With the server argument `enable_deterministic_inference` (GPUs), each completion has its own seed
    from seed, step, index and member, and SGLang guarantees the same tokens in any batch.

    Args:
        devices: names of the rank's devices, one per tensor-parallel process; empty: only `device`.
        any_version: accept an SGLang version that was not tested.
        server: server arguments of SGLang.
    """

    def __init__(
        self,
        model: ModelSettings,
        device: torch.device,
        *,
        max_prompt_tokens: int | None,
        max_batch_sequences: int | None = None,
        devices: Sequence[str] = (),
        any_version: bool = False,
        **server: Argument,
    ) -> None:
        argument_names = known_arguments(device, devices, any_version=any_version)
        check_names(server, argument_names)
        tokenizer, folder = load_tokenizer(model.folder), SweptFolder("rlinf-sglang-")
        served = _model_folder(model, folder.path)
        check_architecture(served)
        self._stop_ids = stop_token_ids(model.folder, tokenizer)
        self._tokenizer, self._max_prompt_tokens = tokenizer, max_prompt_tokens
        self._num_devices = max(1, len(devices))
        self._lost: WorkersError | None = None
        self._results: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        self._is_lost_known = self._is_closed = False
        self._version, self._has_weights = -1, model.has_weights
        self._gives_memory_back = device.type != "cpu"
        self._is_away = self._waits = False
        """Whether its state is offloaded, and whether requests are paused meanwhile."""
        arguments = server_arguments(
            model,
            device,
            num_devices=self._num_devices,
            folder=str(served),
            loader=LOADER,
            stop_token_ids=self._stop_ids,
            engine_options=server,
        )
        try:
            self._server = EngineServer(arguments, folder, self._on_lost)
        except SettingsRefused as error:
            raise SettingsRefused(f"{error}{suspects(str(error), server)}") from error
        self._capacity = Capacity(self._server.num_tokens, max_batch_sequences)
        self._model = replace(model, folder=str(served))
        self._processes = EngineProcesses(self._num_devices, self.enter)
        if device.type == "cuda":
            self.offload()  # a worker's state is loaded onto its GPUs only in its turn

    # -- prompts in, completions out --------------------------------------------------------------------------------

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int, step: int) -> None:
        self._raise_if_lost()
        if not self._has_weights:
            raise WorkersError("the model has no weights of its own, and none have been received from a trainer yet")
        for prompt in prompts:
            self._check_length(prompt, sampling)
        for prompt in prompts:
            self._capacity.begin(prompt, sampling)
            parameters = request_parameters(sampling, self._stop_ids, seed=seed, step=step, index=prompt.index)
            self._server.spawn(self._complete(prompt, sampling, parameters, self._version))

    def finished(self) -> list[Completions]:
        if self._capacity.is_empty:
            return []
        results = [self._results.get()]
        while not self._results.empty():
            results.append(self._results.get())
        answers: list[Completion] = []
        for one in results:
            if isinstance(one, BaseException):
                self._raise_if_lost()
                raise one
            answers.append(one)
            self._capacity.end(one.index, one.member, len(one.token_ids))
        return completions_of(answers)

    def free_capacity(self, group_size: int) -> int:
        return self._capacity.prompts(group_size)

    # -- weights ----------------------------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        return {}

    def layout(self) -> Layout:
        return self._processes.layout(self._model)

    def open_receiver(self, ports: Sequence[WeightPort]) -> WeightReceiver:
        return self._processes.open_receiver(ports)

    def process_ids(self) -> Sequence[int]:
        return self._processes.process_ids()

    def enter(self, address: str) -> None:
        """Runs the weight loader in each of SGLang's processes, once, with no request in flight.

        Args:
            address: passed to the loader as the name of an empty tensor.
        """
        self._raise_if_lost()
        self._server.run(self._enter(address))

    def weights_received(self, policy_version: int) -> None:
        """Requests in flight continue with the new weights from their next token on; the KV cache and the prefix cache
        are dropped and recomputed."""
        self._raise_if_lost()
        self._server.run(self._drop_caches(pauses=not (self._capacity.is_empty or self._waits)))
        self._version, self._has_weights = policy_version, True

    # -- devices ----------------------------------------------------------------------------------------------------

    def onload(self) -> None:
        self._raise_if_lost()
        if self._is_away:
            if self._gives_memory_back:
                self._server.run(self._resume(continues=self._waits))
            elif self._waits:
                self._server.run(self._continue())
            self._is_away = self._waits = False

    def offload(self) -> None:
        """On CPU slots SGLang's memory stays allocated, and only requests in flight are paused: SGLang cannot release
        memory there, and asking it to takes up to a second."""
        self._raise_if_lost()
        if not self._is_away:
            self._waits = not self._capacity.is_empty
            if self._gives_memory_back:
                self._server.run(self._release(pauses=self._waits))
            elif self._waits:
                self._server.run(self._pause())
            self._is_away = True

    def close(self) -> None:
        self._is_closed = True
        self._processes.close()
        self._server.close()

    # -- in the engine's loop ---------------------------------------------------------------------------------------

    async def _complete(
        self, prompt: Prompt, sampling: SamplingSettings, parameters: Sequence[dict[str, Any]], version: int
    ) -> None:
        """Puts each completion of a prompt, or the error, into the results."""
        try:
            token_ids = prompt.token_ids.tolist()
            if len(parameters) > 1:  # prefill once: requests that arrive together would each compute it
                await self._server.engine.async_generate(input_ids=token_ids, sampling_params={"max_new_tokens": 0})
            await asyncio.gather(
                *(
                    self._complete_one(prompt.index, member, token_ids, one, sampling.stop, version)
                    for member, one in enumerate(parameters)
                )
            )
        except Exception as error:  # noqa: BLE001 - raised where completions are awaited
            self._results.put(error)

    async def _complete_one(
        self,
        index: int,
        member: int,
        token_ids: list[int],
        parameters: dict[str, Any],
        stop: tuple[str, ...],
        version: int,
    ) -> None:
        request = {"input_ids": token_ids, "sampling_params": parameters, "return_logprob": True}
        if stop:
            output = await self._until_stop(request, StopStrings(self._tokenizer, stop))
        else:
            output = await self._server.engine.async_generate(**request)
        self._results.put(answer_of(output, self._stop_ids, index=index, member=member, policy_version=version))

    async def _until_stop(self, request: dict[str, Any], stops: StopStrings) -> dict[str, Any]:
        """The output of a request, truncated after the first stop string; SGLang has no tokenizer to find it."""
        output, begun = {}, 0
        request["sampling_params"] |= {"stream_interval": STOP_INTERVAL}
        async with contextlib.aclosing(await self._server.engine.async_generate(**request, stream=True)) as outputs:
            async for output in outputs:
                end = stops.end(output["output_ids"], begun=begun)
                if end is not None:
                    return cut_at(output, end)  # closing the generator cancels the request
                begun = len(output["output_ids"])
        return output

    async def _enter(self, address: str) -> None:
        from rlinf_workers.engines.sglang import srt

        manager = self._server.manager
        tensors = [
            srt.MultiprocessingSerializer.serialize([(address, torch.empty(0))]) for _ in range(self._num_devices)
        ]
        for method, request in (
            (manager.begin_weight_update, srt.BeginWeightUpdateReqInput(selector="all")),
            (
                manager.update_weights_from_tensor,
                srt.UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=tensors, load_format=LOADER, flush_cache=True
                ),
            ),
            (manager.end_weight_update, srt.EndWeightUpdateReqInput()),
        ):
            succeeded, message, *_ = await method(request, None)
            if not succeeded:
                raise WorkersError(f"SGLang refused to run the weight loader: {message}")

    async def _drop_caches(self, *, pauses: bool) -> None:
        if pauses:
            await self._pause()
        answer = await self._server.manager.flush_cache(timeout_s=IDLE_S)
        if not answer.success:
            raise WorkersError(f"SGLang did not drop its caches of earlier weights: {answer.message}")
        if pauses:
            await self._continue()

    async def _release(self, *, pauses: bool) -> None:
        from rlinf_workers.engines.sglang import srt

        if pauses:
            await self._pause()
        await self._server.manager.flush_cache(timeout_s=IDLE_S)  # also waits for requests that ended at a stop string
        await self._server.manager.release_memory_occupation(srt.ReleaseMemoryOccupationReqInput())

    async def _resume(self, *, continues: bool) -> None:
        from rlinf_workers.engines.sglang import srt

        await self._server.manager.resume_memory_occupation(srt.ResumeMemoryOccupationReqInput())
        if continues:
            await self._continue()

    async def _pause(self) -> None:
        """Running requests return to the waiting queue without their KV cache. A paused scheduler uses a whole core, so
        it is paused only if requests are in flight."""
        from rlinf_workers.engines.sglang import srt

        await self._server.manager.pause_generation(srt.PauseGenerationReqInput(mode="retract"))

    async def _continue(self) -> None:
        from rlinf_workers.engines.sglang import srt

        await self._server.manager.continue_generation(srt.ContinueGenerationReqInput())

    # -- checks -----------------------------------------------------------------------------------------------------

    def _on_lost(self, error: WorkersError) -> None:
        """Called when a process of the engine has ended. The next call of any method raises the error; if none comes
        (the trainer computes), the worker ends with it, as any process with SGLang in it would."""
        self._lost = error
        self._results.put(error)
        time.sleep(LOST_S)
        if not self._is_lost_known and not self._is_closed:
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            self._is_lost_known = True
            raise self._lost

    def _check_length(self, prompt: Prompt, sampling: SamplingSettings) -> None:
        length, longest = len(prompt.token_ids), self._max_prompt_tokens
        if longest is not None and length > longest:
            raise ValueError(f"prompt {prompt.index} has {length} tokens; max_prompt_tokens allows {longest}")
        needed, limit = length + sampling.max_new_tokens, self._server.num_sequence_tokens
        if needed > limit:
            raise WorkersError(
                f"prompt {prompt.index} and its completion may have {length} + {sampling.max_new_tokens} = {needed} "
                f"tokens, and SGLang accepts {limit} in one sequence (its KV cache holds {self._server.num_tokens}). "
                "Give it more (engine_options.mem_fraction_static, or max_total_tokens on CPU slots), or lower "
                "max_new_tokens or max_prompt_tokens"
            )


def known_arguments(device: torch.device, devices: Sequence[str], *, any_version: bool) -> list[str]:
    """Imports SGLang as the devices require; returns the names of its server arguments.

    Raises: SettingsRefused if it is not installed, or in an untested version.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        actual = version("sglang")
    except PackageNotFoundError:
        raise SettingsRefused(
            "SGLang is not installed in the venv of the rollout; `rlinf venv create sglang` creates one that has it"
        ) from None
    if actual not in SPEC.known_versions and not any_version:
        raise SettingsRefused(
            f"SGLang {actual} is installed; known to work: {', '.join(SPEC.known_versions)}. "
            "`rlinf venv create sglang` installs that one; engine_options.any_version=true accepts the installed one"
        )
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if device.type == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        if len(devices) > 1:
            cores = sorted(os.sched_getaffinity(0))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound_cores(devices, cores))
    from rlinf_workers.engines.sglang import srt

    return list(srt.ServerArgs.__struct_fields__)


def check_architecture(folder: Path) -> None:
    """Checks that SGLang has its own implementation of a model. It would serve others through transformers, with
    parameters in other places; this searches its sources for the name, without importing them.

    Raises: SettingsRefused.
    """
    names = json.loads((folder / "config.json").read_text()).get("architectures") or ["None"]
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations, "its version was read before"
    sources = Path(spec.submodule_search_locations[0], "srt", "models").rglob("*.py")
    if not any(re.search(rf"\b{re.escape(names[0])}\b", path.read_text()) for path in sources):
        raise SettingsRefused(
            f"SGLang does not implement {names[0]} (architectures in config.json of the model); use "
            "the engine huggingface, or a model that it implements"
        )


def _model_folder(model: ModelSettings, folder: Path) -> Path:
    """The folder that SGLang loads: the model's own, one with its adapter merged, or one with only a config."""
    if model.has_weights and not is_adapter(model.folder):
        return Path(model.folder)
    if model.has_weights:
        build_model(model, torch.device("cpu")).save_pretrained(folder)
    else:
        describe_model(model, str(folder))
    return folder

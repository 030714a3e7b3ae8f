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
from rlinf_workers.engines.base import Completions, OnNewWeights, UnfinishedCompletion, not_begun
from rlinf_workers.engines.processes import EngineProcesses
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings
from rlinf_workers.engines.sglang.arguments import (
    Argument,
    bound_cores,
    check_names,
    fraction_of,
    server_arguments,
    suspects,
)
from rlinf_workers.engines.sglang.capacity import Capacity
from rlinf_workers.engines.sglang.experts import ExpertRows
from rlinf_workers.engines.sglang.loader import LOADER
from rlinf_workers.engines.sglang.requests import (
    Completion,
    answer_of,
    completions_of,
    cut_at,
    request_parameters,
)
from rlinf_workers.engines.sglang.server import EngineServer
from rlinf_workers.engines.sglang.spec import SPEC
from rlinf_workers.engines.stopping import StopStrings
from rlinf_workers.errors import SettingsRefused, WorkersError
from rlinf_workers.gpu_memory import free_gpu_bytes
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
IDLE_S = 3600.0
"""Time limit of SGLang for its scheduler to become idle. The deadline of the step, which follows from predicted and
measured times, passes before."""
ABORT_INTERVAL_S = 0.02
"""Between two aborts of all requests, until all have come back: a request may still be on its way to SGLang."""
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
        static_bytes: weights and KV pool on a GPU, from which `mem_fraction_static` follows if it is not given.
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
        static_bytes: int | None = None,
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
        self._results: queue.SimpleQueue[Completion | UnfinishedCompletion | BaseException | None] = queue.SimpleQueue()
        """None: `interrupt` was called."""
        self._options = dict(server)
        config = json.loads((served / "config.json").read_text())
        self._expert_rows = ExpertRows.of(config) if server.get("enable_return_routed_experts") else None
        self._on_new_weights: OnNewWeights | None = None
        """None: not paused."""
        self.num_steps = 0
        """Completions that `finished` has returned, in place of decode steps, which SGLang does not report."""
        self._num_open = 0
        """Groups whose requests have not all come back; in the engine's loop."""
        self._is_suspending = False
        self._is_lost_known = self._is_closed = False
        self._version, self._has_weights = -1, model.has_weights and model.quantization is None
        self._gives_memory_back = device.type != "cpu"
        self._is_away = self._waits = self._is_saved = False
        """Whether its state is offloaded, whether requests are paused meanwhile, and whether the processes have copies
        of their weights."""
        arguments = server_arguments(
            model,
            device,
            num_devices=self._num_devices,
            folder=str(served),
            loader=LOADER,
            stop_token_ids=self._stop_ids,
            engine_options=server,
            static_fraction=self._static_fraction(static_bytes),
        )
        self._backs_weights_up = bool(arguments.get("enable_weights_cpu_backup"))
        try:
            self._server = EngineServer(arguments, folder, self._on_lost)
        except SettingsRefused as error:
            raise SettingsRefused(f"{error}{suspects(str(error), server)}") from error
        self._note_small_pool()
        self._capacity = Capacity(self._server.num_tokens, max_batch_sequences)
        self._model = replace(model, folder=str(served))
        self._processes = EngineProcesses(self._num_devices, self.enter)
        if device.type == "cuda":
            self.offload()  # a worker's state is loaded onto its GPUs only in its turn

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

    # -- prompts in, completions out --------------------------------------------------------------------------------

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int, step: int) -> None:
        self._raise_if_lost()
        if not self._has_weights:
            raise WorkersError("the model has no weights of its own, and none have been received from a trainer yet")
        if sampling.records_experts and self._expert_rows is None:
            raise ValueError("records_experts: engine_options.enable_return_routed_experts is not true")
        for prompt in prompts:
            self._check_length(prompt, sampling)
        for prompt in prompts:
            self._capacity.begin(prompt, sampling)
            key = NoiseKey(seed=seed, step=step, index=prompt.index)
            requests = not_begun(prompt, sampling.group_size, key)
            self._server.spawn(self._complete(requests, sampling, self._version))

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
            if one is None:
                continue
            assert isinstance(one, Completion), "suspended completions are taken by suspend"
            answers.append(one)
            self._capacity.end(one.index, one.member, len(one.token_ids))
        self.num_steps += len(answers)
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
        """Runs the weight loader in each of SGLang's processes, once, while none computes: after `pause`, or with no
        request in flight.

        Args:
            address: passed to the loader as the name of an empty tensor.
        """
        self._raise_if_lost()
        self._server.run(self._enter(address))

    def weights_received(self, policy_version: int) -> None:
        """Requests in flight continue with the new weights from their next token on. The KV cache and the prefix cache
        are dropped and recomputed, except after `pause("keep")`."""
        self._raise_if_lost()
        if self._on_new_weights is None:
            pauses = not (self._capacity.is_empty or self._waits)
            self._server.run(self._begin_version(policy_version, pauses=pauses))
        else:
            self._server.run(self._begin_version(policy_version, drops=self._on_new_weights != "keep"))
        self._version, self._has_weights = policy_version, True

    # -- new weights while requests are in flight, and requests that are suspended ------------------------------------

    def interrupt(self, at_step: int = 0) -> None:
        self._results.put(None)

    def pause(self, on_new_weights: OnNewWeights) -> list[Completions]:
        """With `finish`, all requests in flight end first."""
        self._raise_if_lost()
        has_stop = any(sampling.stop for sampling in self._capacity.samplings)
        if problem := SPEC.new_weights_problem(self._options, on_new_weights, has_stop=has_stop):
            raise ValueError(f"the engine sglang with on_new_weights={on_new_weights}: {problem}")
        ended = []
        while on_new_weights == "finish" and not self._capacity.is_empty:
            ended += self.finished()
        if not self._capacity.is_empty:
            self._server.run(self._pause("in_place" if on_new_weights == "keep" else "retract"))
            self._on_new_weights = on_new_weights
        return ended

    def resume(self) -> None:
        self._raise_if_lost()
        if self._on_new_weights is not None:
            self._server.run(self._continue())
            self._on_new_weights = None

    def suspend(self) -> list[UnfinishedCompletion]:
        """Aborts all requests; SGLang computes one more token of those that run. If it had moved a request back to its
        queue for lack of memory, some of its tokens are lost and sampled again."""
        self._raise_if_lost()
        if self._on_new_weights is not None:
            raise RuntimeError("the engine is paused; call resume() before suspend()")
        self._server.run(self._abort_all())
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        unfinished = []
        for one in results:
            if isinstance(one, BaseException):
                self._raise_if_lost()
                raise one
            if isinstance(one, UnfinishedCompletion):
                self._capacity.drop(one.prompt.index, one.member)
                unfinished.append(one)
            else:
                self._results.put(one)
        return unfinished

    def submit_unfinished(self, unfinished: Sequence[UnfinishedCompletion], sampling: SamplingSettings) -> None:
        self._raise_if_lost()
        groups: dict[int, list[UnfinishedCompletion]] = {}
        for one in unfinished:
            self._check_length(one.prompt, sampling)
            groups.setdefault(one.prompt.index, []).append(one)
        for requests in groups.values():
            self._capacity.begin(requests[0].prompt, sampling, [one.member for one in requests])
            self._server.spawn(self._complete(requests, sampling, self._version))

    # -- devices ----------------------------------------------------------------------------------------------------

    def onload(self) -> None:
        self._raise_if_lost()
        if self._is_away:
            if self._gives_memory_back:
                self._server.run(self._resume())
                if self._is_saved:
                    self._processes.call("restore_weights")
            if self._waits:
                self._server.run(self._continue())
            self._is_away = self._waits = self._is_saved = False

    def offload(self) -> None:
        """On CPU slots SGLang's memory stays allocated, and only requests in flight are paused: SGLang cannot release
        memory there, and asking it to takes up to a second."""
        self._leave(is_renewed=False)

    def discard(self) -> None:
        """The weights take no memory anywhere meanwhile, unless requests in flight go on with them."""
        self._leave(is_renewed=True)

    def _leave(self, *, is_renewed: bool) -> None:
        self._raise_if_lost()
        if not self._is_away:
            self._waits = not self._capacity.is_empty
            if self._gives_memory_back:
                if not self._backs_weights_up and self._has_weights:
                    if is_renewed and not self._waits:
                        self._has_weights = False
                    else:
                        self._processes.call("save_weights")
                        self._is_saved = True
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
        self, requests: Sequence[UnfinishedCompletion], sampling: SamplingSettings, version: int
    ) -> None:
        """Puts each completion of a prompt, or the error, into the results."""
        self._num_open += 1
        rows, before = self._expert_rows if sampling.records_experts else None, None
        try:
            if len(requests) > 1:  # prefill once: requests that arrive together would each compute it
                prompt_ids = requests[0].prompt.token_ids.tolist()
                output = await self._server.engine.async_generate(
                    input_ids=prompt_ids,
                    sampling_params={"max_new_tokens": 0},
                    return_routed_experts=rows is not None,
                )
                before = None if rows is None else rows.read(output["meta_info"], len(prompt_ids) - 1)
            await asyncio.gather(*(self._complete_one(request, sampling, version, before) for request in requests))
        except Exception as error:  # noqa: BLE001 - raised where completions are awaited
            self._results.put(error)
        finally:
            self._num_open -= 1

    async def _complete_one(
        self, request: UnfinishedCompletion, sampling: SamplingSettings, version: int, before: Tensor | None
    ) -> None:
        """
        Args:
            before: [L - 1, layers, k], experts of the prompt without its last token; None: they come with the request.
        """
        if self._is_suspending:
            self._results.put(request)
            return
        arguments = {
            "input_ids": [*request.prompt.token_ids.tolist(), *request.token_ids.tolist()],
            "sampling_params": request_parameters(request, sampling, self._stop_ids),
            "return_logprob": True,
        }
        if sampling.records_experts:
            arguments |= {
                "return_routed_experts": True,
                "routed_experts_start_len": 0 if before is None else len(before),
            }
        if sampling.stop:
            stops = StopStrings(self._tokenizer, sampling.stop)
            output = await self._until_stop(arguments, stops, request.token_ids.tolist())
        else:
            output = await self._server.engine.async_generate(**arguments)
        answer = answer_of(
            output,
            request,
            self._stop_ids,
            max_new_tokens=sampling.max_new_tokens,
            policy_version=version,
            is_suspended=self._is_suspending,
        )
        if sampling.records_experts and isinstance(answer, Completion):
            answer = self._with_experts(answer, output["meta_info"], len(request.prompt.token_ids), before)
        self._results.put(answer)

    def _with_experts(
        self, answer: Completion, about: Mapping[str, Any], num_prompt_tokens: int, before: Tensor | None
    ) -> Completion:
        """Adds the experts of its prompt, and of all its tokens but the last."""
        assert self._expert_rows is not None, "refused by submit"
        num_before = 0 if before is None else len(before)
        rows = self._expert_rows.read(about, num_prompt_tokens + len(answer.token_ids) - 1 - num_before)
        experts = rows if before is None else torch.cat([before, rows])
        return replace(answer, prompt_experts=experts[:num_prompt_tokens], experts=experts[num_prompt_tokens:])

    async def _until_stop(self, request: dict[str, Any], stops: StopStrings, before: Sequence[int]) -> dict[str, Any]:
        """The output of a request, truncated after the first stop string; SGLang has no tokenizer to find it.

        Args:
            before: tokens of the completion that the request continues.
        """
        output, begun = {}, len(before)
        request["sampling_params"] |= {"stream_interval": STOP_INTERVAL}
        async with contextlib.aclosing(await self._server.engine.async_generate(**request, stream=True)) as outputs:
            async for output in outputs:
                end = stops.end([*before, *output["output_ids"]], begun=begun)
                if end is not None:
                    return cut_at(output, end - len(before))  # closing the generator cancels the request
                begun = len(before) + len(output["output_ids"])
        return output

    async def _abort_all(self) -> None:
        """Returns when all requests in flight are in the results."""
        self._is_suspending = True
        try:
            while self._num_open:
                self._server.manager.abort_request(abort_all=True)
                await asyncio.sleep(ABORT_INTERVAL_S)
        finally:
            self._is_suspending = False

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
                    serialized_named_tensors=tensors, load_format=LOADER, flush_cache=self._on_new_weights != "keep"
                ),
            ),
            (manager.end_weight_update, srt.EndWeightUpdateReqInput()),
        ):
            succeeded, message, *_ = await method(request, None)
            if not succeeded:
                raise WorkersError(f"SGLang refused to run the weight loader: {message}")

    async def _begin_version(self, policy_version: int, *, pauses: bool = False, drops: bool = True) -> None:
        """Counts later tokens as sampled by this version, and drops what earlier ones computed."""
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

    async def _release(self, *, pauses: bool) -> None:
        from rlinf_workers.engines.sglang import srt

        if pauses:
            await self._pause()
        await self._flush_caches(is_paused=pauses)
        await self._server.manager.release_memory_occupation(srt.ReleaseMemoryOccupationReqInput())

    async def _resume(self) -> None:
        from rlinf_workers.engines.sglang import srt

        await self._server.manager.resume_memory_occupation(srt.ResumeMemoryOccupationReqInput())

    async def _pause(self, mode: str = "retract") -> None:
        """With `retract`, running requests return to the waiting queue without their KV cache; with `in_place` they
        keep it. A paused scheduler uses a whole core, so it is paused only if requests are in flight."""
        from rlinf_workers.engines.sglang import srt

        await self._server.manager.pause_generation(srt.PauseGenerationReqInput(mode=mode))

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

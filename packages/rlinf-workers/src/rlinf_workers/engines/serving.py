"""What generation engines in front of a server share: requests in flight, weights in the server's processes, and
processes that die. SGLang and vLLM derive from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf_comm.weights import Layout
from rlinf_workers.engines.base import Completions, OnNewWeights, UnfinishedCompletion, not_begun
from rlinf_workers.engines.capacity import Capacity
from rlinf_workers.engines.completions import Completion, ServerAnswer, completions_of, joined
from rlinf_workers.engines.processes import EngineProcesses
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings
from rlinf_workers.engines.served_spec import ServedSpec
from rlinf_workers.engines.server_loop import ServerLoop
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

ABORT_INTERVAL_S = 0.02
"""Between two aborts of all requests, until all have come back: a request may still be on its way to the server."""
STOP_INTERVAL = 8
"""Tokens between two checks for a stop string: each is a message, and at most this many tokens are computed in vain."""
LOST_S = 1.0
"""Time within which the stage notices a dead process of the engine."""


class ServingEngine:
    """A GenerationEngine in front of a server with one process per device of the rank.

    A subclass calls `_prepare`, then `_serve` with what starts its server; it implements the coroutines at the end of
    this class, which run in the server's loop.
    """

    SPEC: ClassVar[ServedSpec]
    CACHE_OPTIONS: ClassVar[str]
    """Options that make its KV cache larger, for messages."""
    CHECKS_WAKES: ClassVar[bool] = False
    """Whether its weights are compared with those that it had, after its memory was released and allocated again and
    before it goes on; always with an adapter, whose base no sync renews."""
    PAUSES_ASLEEP: ClassVar[bool] = False
    """Whether it computes nothing after `_resume` until `_continue`, also if no request is in flight."""

    DROPS_WEIGHTS: ClassVar[bool] = False
    """Whether `_release` can leave out the copy of the weights that the server keeps by itself."""

    _server: Any
    """A `ServerLoop`; subclasses also use what is their own."""
    _backs_weights_up = True
    """Whether the server keeps a copy of the weights by itself when it releases its memory."""
    _has_adapter = False
    """Whether syncs fill an adapter alone, beside a base that they do not renew."""
    _is_remembered = False
    """Whether the processes have digests of their weights while its state is offloaded."""

    def _prepare(
        self,
        model: ModelSettings,
        device: torch.device,
        *,
        max_prompt_tokens: int | None,
        num_devices: int,
        options: Mapping[str, Any],
    ) -> None:
        self._folder = SweptFolder(f"rlinf-{self.SPEC.name}-")
        self._model = replace(model, folder=str(model_folder(model, self._folder.path)))
        tokenizer = load_tokenizer(model.folder)
        self._stop_ids = stop_token_ids(model.folder, tokenizer)
        self._tokenizer, self._max_prompt_tokens = tokenizer, max_prompt_tokens
        self._num_devices, self._has_adapter = num_devices, model.adapter is not None
        self._lost: WorkersError | None = None
        self._results: queue.SimpleQueue[Completion | UnfinishedCompletion | BaseException | None] = queue.SimpleQueue()
        """None: `interrupt` was called."""
        self._options = dict(options)
        self._on_new_weights: OnNewWeights | None = None
        """None: not paused."""
        self.num_steps = 0
        """Completions that `finished` has returned, in place of decode steps, which servers do not report."""
        self._num_open = 0
        """Groups whose requests have not all come back; in the server's loop."""
        self._is_suspending = False
        self._is_lost_known = self._is_closed = False
        self._version, self._has_weights = -1, model.has_weights and model.quantization is None
        self._gives_memory_back = device.type != "cpu"
        self._is_away = self._waits = self._is_saved = False
        """Whether its state is offloaded; and meanwhile, whether requests are paused, and whether the processes have
        copies of their weights."""

    def _serve(self, start: Callable[[], ServerLoop], device: torch.device, max_sequences: int | None) -> None:
        """Starts the server, and connects to its processes.

        Raises: SettingsRefused, with the recipe's arguments that the server's error mentions.
        """
        try:
            server = start()
        except SettingsRefused as error:
            raise SettingsRefused(f"{error}{suspects(str(error), self._options)}") from error
        self._server = server
        self._capacity = Capacity(server.num_tokens, max_sequences)
        self._processes = EngineProcesses(self._num_devices, self.enter, num_stored_bytes(Path(self._model.folder)))
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

    def reserved_bytes(self) -> int:
        return self._processes.reserved_bytes()

    def enter(self, ticket: str) -> None:
        """Calls `inside.enter` in each process of the server, once, while none computes: after `pause`, or with no
        request in flight."""
        self._raise_if_lost()
        self._server.run(self._enter(ticket))

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
        if problem := self.SPEC.new_weights_problem(self._options, on_new_weights, has_stop=has_stop):
            raise ValueError(f"the engine {self.SPEC.name} with on_new_weights={on_new_weights}: {problem}")
        ended = []
        while on_new_weights == "finish" and not self._capacity.is_empty:
            ended += self.finished()
        if not self._capacity.is_empty:
            self._server.run(self._pause(keeps=on_new_weights == "keep"))
            self._on_new_weights = on_new_weights
        return ended

    def resume(self) -> None:
        self._raise_if_lost()
        if self._on_new_weights is not None:
            self._server.run(self._continue())
            self._on_new_weights = None

    def suspend(self) -> list[UnfinishedCompletion]:
        """Aborts all requests; a server may compute one more token of those that run."""
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
                if self._is_remembered:
                    self._processes.call("check_remembered")
            if self._waits or (self._gives_memory_back and self.PAUSES_ASLEEP):
                self._server.run(self._continue())
            self._is_away = self._waits = self._is_saved = self._is_remembered = False

    def offload(self) -> None:
        """On CPU slots the memory stays allocated, and only requests in flight are paused: no server can release memory
        there."""
        self._leave(is_renewed=False)

    def discard(self) -> None:
        """The weights take no memory anywhere meanwhile, unless requests in flight go on with them, the server keeps
        copies by itself, or a sync renews an adapter alone."""
        self._leave(is_renewed=not self._has_adapter)

    def _leave(self, *, is_renewed: bool) -> None:
        self._raise_if_lost()
        if not self._is_away:
            self._waits = not self._capacity.is_empty
            if self._gives_memory_back:
                is_unread = not self._has_weights or (is_renewed and not self._waits)
                can_drop = not self._has_adapter and (self.DROPS_WEIGHTS or not self._backs_weights_up)
                drops = is_unread and can_drop
                if drops:
                    self._has_weights = False
                elif not self._backs_weights_up:
                    self._processes.call("save_weights")
                    self._is_saved = True
                if (self.CHECKS_WAKES or self._has_adapter) and self._has_weights:
                    self._processes.call("remember")
                    self._is_remembered = True
                self._server.run(self._release(pauses=self._waits, drops=drops))
            elif self._waits:
                self._server.run(self._pause())
            self._is_away = True

    def close(self) -> None:
        self._is_closed = True
        self._processes.close()
        self._server.close()

    # -- in the server's loop ---------------------------------------------------------------------------------------

    async def _complete(
        self, requests: Sequence[UnfinishedCompletion], sampling: SamplingSettings, version: int
    ) -> None:
        """Puts each completion of a prompt, or the error, into the results."""
        self._num_open += 1
        try:
            before = await self._prefill(requests[0].prompt, sampling) if len(requests) > 1 else None
            await asyncio.gather(*(self._complete_one(request, sampling, version, before) for request in requests))
        except Exception as error:  # noqa: BLE001 - raised where completions are awaited
            self._results.put(error)
        finally:
            self._num_open -= 1

    async def _complete_one(
        self, request: UnfinishedCompletion, sampling: SamplingSettings, version: int, before: Tensor | None
    ) -> None:
        if self._is_suspending:
            self._results.put(request)
        else:
            self._results.put(await self._generate(request, sampling, version, before))

    async def _generate(
        self, request: UnfinishedCompletion, sampling: SamplingSettings, version: int, before: Tensor | None
    ) -> Completion | UnfinishedCompletion:
        """Samples the rest of a completion.

        Args:
            version: samples the tokens if the server does not report versions.
            before: as `_prefill` returned it.
        """
        answer = await self._last_answer(request, sampling, before)
        completion = joined(
            request,
            answer,
            self._stop_ids,
            title=self.SPEC.arguments.title,
            max_new_tokens=sampling.max_new_tokens,
            policy_version=version,
            is_suspended=self._is_suspending,
        )
        if sampling.records_experts and isinstance(completion, Completion):
            return self._with_experts(completion, answer, len(request.prompt.token_ids), before)
        return completion

    async def _last_answer(
        self, request: UnfinishedCompletion, sampling: SamplingSettings, before: Tensor | None
    ) -> ServerAnswer:
        """All that the server samples of a request, truncated after the first stop string; servers have no tokenizer to
        find it."""
        stops = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        earlier, answer = request.token_ids.tolist(), None
        begun = len(earlier)
        async with contextlib.aclosing(self._answers(request, sampling, before, streams=bool(stops))) as answers:
            async for answer in answers:
                if stops is None:
                    continue
                end = stops.end([*earlier, *answer.token_ids], begun=begun)
                if end is not None:
                    return answer.up_to(end - len(earlier))
                begun = len(earlier) + len(answer.token_ids)
        if answer is None:
            raise WorkersError(f"{self.SPEC.arguments.title} ended a request without an output")
        return answer

    async def _abort_all(self) -> None:
        """Returns when all requests in flight are in the results."""
        self._is_suspending = True
        try:
            while self._num_open:
                self._abort_requests()
                await asyncio.sleep(ABORT_INTERVAL_S)
        finally:
            self._is_suspending = False

    # -- checks -----------------------------------------------------------------------------------------------------

    def _on_lost(self, error: WorkersError) -> None:
        """Called when a process of the engine has ended. The next call of any method raises the error; if none comes
        (the trainer computes), the worker ends with it, as any process that holds a server would."""
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
                f"tokens, and {self.SPEC.arguments.title} accepts {limit} in one sequence (its KV cache holds "
                f"{self._server.num_tokens}). Give it more ({self.CACHE_OPTIONS}), or lower max_new_tokens or "
                "max_prompt_tokens"
            )

    # -- what a subclass implements ---------------------------------------------------------------------------------

    async def _prefill(self, prompt: Prompt, sampling: SamplingSettings) -> Tensor | None:
        """Computes a prompt before its group, in a server where requests that arrive together would each compute it.

        Returns: [L - 1, layers, k], experts of the prompt without its last token; None: they come with each request.
        """
        return None

    def _answers(
        self, request: UnfinishedCompletion, sampling: SamplingSettings, before: Tensor | None, *, streams: bool
    ) -> AsyncGenerator[ServerAnswer, None]:
        """Samples the rest of a completion; closing the generator cancels the request.

        Args:
            before: as `_prefill` returned it.
            streams: yield all tokens so far after each STOP_INTERVAL, not only at the end.
        """
        raise NotImplementedError

    def _with_experts(
        self, completion: Completion, answer: ServerAnswer, num_prompt_tokens: int, before: Tensor | None
    ) -> Completion:
        """Adds the experts of a completion's tokens, with settings that record them."""
        raise NotImplementedError

    def _abort_requests(self) -> None:
        """Aborts all requests that have reached the server; their coroutines return what they have."""
        raise NotImplementedError

    async def _enter(self, ticket: str) -> None:
        """Calls `inside.enter` in each process of the server, see `enter`."""
        raise NotImplementedError

    async def _begin_version(self, policy_version: int, *, pauses: bool = False, drops: bool = True) -> None:
        """Counts later tokens as sampled by this version.

        Args:
            pauses: pause requests in flight meanwhile.
            drops: drop what earlier versions computed.
        """
        raise NotImplementedError

    async def _pause(self, *, keeps: bool = False) -> None:
        """Stops computing requests in flight; `keeps`: with their KV cache."""
        raise NotImplementedError

    async def _continue(self) -> None:
        """Goes on with them."""
        raise NotImplementedError

    async def _release(self, *, pauses: bool, drops: bool = False) -> None:
        """Frees the memory of weights and KV cache, after a pause if requests are in flight.

        Args:
            drops: the weights need not be there after `_resume`, since a sync fills them before they are read.
        """
        raise NotImplementedError

    async def _resume(self) -> None:
        """Allocates the memory again, with the weights as they were unless they are restored."""
        raise NotImplementedError


def model_folder(model: ModelSettings, folder: Path) -> Path:
    """The folder that a server loads: the model's own, one with its adapter merged, or one with only a config."""
    if model.has_weights and not is_adapter(model.folder):
        return Path(model.folder)
    if model.has_weights:
        build_model(model, torch.device("cpu")).save_pretrained(folder)
    else:
        describe_model(model, str(folder))
    return folder


def check_version(spec: ServedSpec, *, any_version: bool) -> None:
    """Checks the installed version of an engine's package.

    Raises: SettingsRefused if it is not installed, or in an untested version.
    """
    actual, title = next(filter(None, map(_version_of, spec.packages)), None), spec.arguments.title
    if actual is None:
        raise SettingsRefused(
            f"{title} is not installed in the venv of the rollout; `rlinf venv create {spec.name}` creates one "
            "that has it"
        )
    if actual not in spec.known_versions and not any_version:
        raise SettingsRefused(
            f"{title} {actual} is installed; known to work: {', '.join(spec.known_versions)}. `rlinf venv create "
            f"{spec.name}` installs that one; engine_options.any_version=true accepts the installed one"
        )


@contextlib.contextmanager
def api_of(spec: ServedSpec) -> Iterator[None]:
    """For imports from an engine's package. Raises: SettingsRefused with the version that is installed, and those that
    are known to work, if a name is missing."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        title, actual = spec.arguments.title, next(filter(None, map(_version_of, spec.packages)), None)
        raise SettingsRefused(
            f"{title} {actual} cannot be used: {type(error).__name__}: {error}. Known to work: "
            f"{', '.join(spec.known_versions)}; `rlinf venv create {spec.name}` installs that one"
        ) from error


def num_stored_bytes(folder: Path) -> int:
    """Bytes of a model's files of weights; 0 for a folder with only a config."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def suspects(message: str, engine_options: Mapping[str, Any]) -> str:
    """A line with the recipe's arguments whose values an error of the server mentions, or with all of them."""
    named = [name for name, value in engine_options.items() if str(value) in message] or list(engine_options)
    settings = ", ".join(f"engine_options.{name}={engine_options[name]}" for name in named)
    return f"\nit was started with {settings}" if settings else ""


def bound_cores(devices: Sequence[str], cores: Sequence[int]) -> str:
    """The cores of a server as SGLang and vLLM read them: one per tensor-parallel process, from a rank's CPU slots.

    Example: ("cpu:2", "cpu:3") on cores 0 to 7 -> "2|3"
    """
    return "|".join(str(cores[int(name.partition(":")[2] or 0) % len(cores)]) for name in devices)

"""The engine `sglang` takes weights while requests run, and suspends them; with a fake of SGLang's engine and manager,
which samples the position of each token."""

import asyncio
import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlinf_workers.engines.capacity import Capacity
from rlinf_workers.engines.inside import Inside
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.engines.sglang.engine import SGLangEngine
from rlinf_workers.errors import WorkersError
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.testing.engines import prompts_of

SAMPLING = SamplingSettings(group_size=2, max_new_tokens=8)
KEEPS = {"disable_radix_cache": True, "disable_overlap_schedule": True}


class FakeSGLang:
    """As much of `Engine` and its manager as requests, pauses and aborts need, and of the server around them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.version = "default"
        self.requests: list[SimpleNamespace] = []
        self.engine = self.manager = self
        self.num_sequence_tokens = self.num_tokens = 1000
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def spawn(self, work):
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def async_generate(self, *, input_ids, sampling_params, **_):
        if not sampling_params["max_new_tokens"]:
            return {}
        done = asyncio.get_running_loop().create_future()
        self.requests.append(
            SimpleNamespace(at=len(input_ids), left=sampling_params["max_new_tokens"], versions=[], done=done)
        )
        return await done

    async def step(self, num_tokens, reason=None):
        """Samples tokens in each request, then ends those that are complete, or all with a reason."""
        for _ in range(20):  # requests that were spawned before arrive
            await asyncio.sleep(0)
        for one in list(self.requests):
            one.versions += [self.version] * min(num_tokens, one.left)
            one.left -= min(num_tokens, one.left)
            if reason or not one.left:
                self.requests.remove(one)
                one.done.set_result(self._output(one, reason or {"type": "length"}))

    def abort_request(self, *, abort_all):
        assert abort_all
        self.calls.append("abort")
        self.spawn(self.step(1, {"type": "abort", "message": "Aborted"}))

    async def pause_generation(self, request):
        self.calls.append(("pause", request.mode))

    async def continue_generation(self, request):
        self.calls.append("continue")

    async def release_memory_occupation(self, request):
        self.calls.append("release")

    async def resume_memory_occupation(self, request):
        self.calls.append("resume")

    async def flush_cache(self, timeout_s):
        self.calls.append("flush")
        return SimpleNamespace(success=True)

    async def update_weight_version(self, request):
        assert not request.abort_all_requests
        self.calls.append("version")
        self.version = request.new_version

    def _output(self, one, reason):
        ids = [one.at + i for i in range(len(one.versions))]
        spans = [{"version": version, "start": i, "end": i + 1} for i, version in enumerate(one.versions)]
        logprobs = [(-float(token), token, None) for token in ids]
        about = {"finish_reason": reason, "output_token_logprobs": logprobs, "weight_versions": spans}
        return {"output_ids": ids, "meta_info": about}


@pytest.fixture
def make_engine(monkeypatch):
    names = ("PauseGenerationReqInput", "ContinueGenerationReqInput", "UpdateWeightVersionReqInput",
             "ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput")  # fmt: skip
    fake_srt = SimpleNamespace(**dict.fromkeys(names, SimpleNamespace))
    monkeypatch.setitem(sys.modules, "rlinf_workers.engines.sglang.srt", fake_srt)
    monkeypatch.setattr("rlinf_workers.engines.sglang.srt", fake_srt, raising=False)
    servers = []

    def make(**options) -> Any:
        engine: Any = object.__new__(SGLangEngine)
        servers.append(FakeSGLang())
        engine._server, engine._capacity, engine._lost = servers[-1], Capacity(1000, None), None
        engine._results, engine._options, engine._on_new_weights = queue.SimpleQueue(), options, None
        engine.num_steps, engine._num_open, engine._is_suspending, engine._waits = 0, 0, False, False
        engine._stop_ids, engine._version, engine._has_weights = (1,), -1, True
        engine._max_prompt_tokens, engine._tokenizer = None, None
        engine._gives_memory_back, engine._backs_weights_up = True, options.get("enable_weights_cpu_backup", False)
        engine._is_away = engine._is_saved = False
        engine._processes = SimpleNamespace(call=servers[-1].calls.append)
        return engine

    yield make
    for server in servers:
        server.run(server.step(0, {"type": "abort"}))
        server.close()


def drain(engine):
    parts = []
    while not engine._capacity.is_empty:
        engine._server.run(engine._server.step(1))
        if not engine._results.empty():
            parts += engine.finished()
    return parts


def tokens_and_versions(parts):
    """(index, member) -> its tokens, and the version of each."""
    completions = {}
    for part in parts:
        for i, member in enumerate(part.members):
            length = int(part.loss_mask[i].sum())
            segments = part.segments[i] if part.segments else ()
            versions = [one.policy_version for one in segments for _ in range(one.num_tokens)]
            assert (part.index, member) not in completions
            assert part.logprobs[i, :length].tolist() == [-token for token in part.token_ids[i, :length].tolist()]
            completions[part.index, member] = (
                part.token_ids[i, :length].tolist(),
                versions or [part.policy_version] * length,
            )
    return completions


@pytest.mark.parametrize(
    ("how", "calls"),
    [
        ("recompute", [("pause", "retract"), "flush", "version", "continue"]),
        ("keep", [("pause", "in_place"), "version", "continue"]),
    ],
)
def test_a_pause_takes_weights_and_goes_on(make_engine, how, calls):
    engine = make_engine(**KEEPS)
    engine.submit(prompts_of([4]), SAMPLING, seed=1, step=0)
    engine._server.run(engine._server.step(3))
    assert engine.pause(how) == []
    engine.weights_received(5)
    engine.resume()
    assert engine._server.calls == calls
    whole = list(range(4, 12)), [-1] * 3 + [5] * 5
    assert tokens_and_versions(drain(engine)) == {(0, 0): whole, (0, 1): whole}


LEAVES_WITH_COPIES = ["save_weights", "flush", "release", "resume", "restore_weights"]


@pytest.mark.parametrize(
    ("leave", "options", "calls"),
    [
        ("offload", {}, LEAVES_WITH_COPIES),
        ("discard", {}, ["flush", "release", "resume"]),
        ("offload", {"enable_weights_cpu_backup": True}, ["flush", "release", "resume"]),
    ],
)
def test_weights_are_copied_to_the_host_only_where_no_sync_follows_and_sglang_does_not(
    make_engine, leave, options, calls
):
    engine = make_engine(**options)
    for _ in range(2):
        engine._server.calls.clear()
        getattr(engine, leave)()
        engine.onload()
        assert engine._server.calls == calls
        engine.weights_received(5)


def test_a_base_beside_an_adapter_is_kept_and_compared_where_a_sync_of_the_adapter_follows(make_engine):
    engine = make_engine()
    engine._has_adapter = True
    engine.discard()
    engine.onload()
    calls = ["save_weights", "remember", "flush", "release", "resume", "restore_weights", "check_remembered"]
    assert engine._server.calls == calls


def test_nothing_is_generated_with_weights_that_were_discarded(make_engine):
    engine = make_engine()
    engine.discard()
    engine.onload()
    with pytest.raises(WorkersError, match="has no weights of its own, and none have been received"):
        engine.submit(prompts_of([4]), SAMPLING, seed=1, step=0)
    engine.weights_received(5)
    engine.submit(prompts_of([4]), SAMPLING, seed=1, step=0)


def test_requests_in_flight_keep_the_weights_that_they_go_on_with(make_engine):
    engine = make_engine()
    engine.submit(prompts_of([4]), SAMPLING, seed=1, step=0)
    engine._server.run(engine._server.step(3))
    engine.discard()
    engine.onload()
    calls = engine._server.calls
    assert calls == ["save_weights", ("pause", "retract"), "flush", "release", "resume", "restore_weights", "continue"]
    assert len(drain(engine)) == 1


def test_finish_ends_what_runs_and_pauses_nothing(make_engine):
    engine = make_engine()
    engine.submit(prompts_of([4]), SAMPLING, seed=1, step=0)
    engine._server.spawn(engine._server.step(8))
    parts = engine.pause("finish")
    engine.weights_received(5)
    engine.resume()
    assert engine._server.calls == ["flush", "version"]
    assert tokens_and_versions(parts)[0, 1] == (list(range(4, 12)), [-1] * 8)


def test_suspended_requests_go_on_with_their_next_token(make_engine):
    engine = make_engine()
    prompts: list[Prompt] = prompts_of([4, 3])
    engine.submit(prompts, SAMPLING, seed=1, step=0)
    engine._server.run(engine._server.step(3))
    unfinished = engine.suspend()
    assert engine.finished() == [] and len(unfinished) == 4
    assert unfinished[0].token_ids.tolist() == [4, 5, 6, 7], "SGLang computes one more"
    other = make_engine()
    other.weights_received(5)
    other.submit_unfinished(unfinished, SAMPLING)
    completions = tokens_and_versions(drain(other))
    assert completions.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for (index, _), completion in completions.items():
        first = len(prompts[index].token_ids)
        assert completion == (list(range(first, first + 8)), [-1] * 4 + [5] * 4)


def test_completions_that_ended_before_they_were_suspended_are_finished(make_engine):
    engine = make_engine()
    engine.submit(prompts_of([4]), SAMPLING, seed=1, step=0)
    engine._server.run(engine._server.step(7))
    assert engine.suspend() == [], "the token that SGLang computes before it aborts is their last"
    assert len(tokens_and_versions(engine.finished())) == 2 and engine._capacity.is_empty


def test_an_interrupt_lets_finished_return(make_engine):
    engine = make_engine()
    engine.submit(prompts_of([4]), SAMPLING, seed=1, step=0)
    engine.interrupt()
    assert engine.finished() == []


def test_what_sglang_cannot_do_is_refused_with_what_to_set(make_engine):
    with pytest.raises(ValueError, match=r"set engine_options\.disable_overlap_schedule=true, or use recompute"):
        make_engine(disable_radix_cache=True).pause("keep")
    engine = make_engine(**KEEPS)
    engine._capacity.begin(prompts_of([4])[0], replace(SAMPLING, stop=("</a>",)))
    with pytest.raises(ValueError, match="ends at a stop string; use finish, or no stop strings"):
        engine.pause("recompute")
    engine = make_engine()
    engine.submit([replace(prompts_of([4])[0], token_ids=torch.tensor([2]))], SAMPLING, seed=1, step=0)
    engine.pause("recompute")
    with pytest.raises(RuntimeError, match=r"paused; call resume\(\) before suspend"):
        engine.suspend()


class Parameters:
    """What `Inside` needs of a model."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


def test_a_process_restores_the_parameters_that_it_saved():
    """Its memory holds anything meanwhile; the copies are gone afterwards."""
    parameters = {"a": torch.randn(4, 3), "b": torch.arange(5.0)}
    expected = {name: tensor.clone() for name, tensor in parameters.items()}
    inside = Inside(
        connection=None,  # pyright: ignore[reportArgumentType] - nothing is sent
        model=Parameters(parameters),
        sizes={},
    )
    inside.save_weights()
    for tensor in parameters.values():
        tensor.fill_(float("nan"))
    inside.restore_weights()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())
    assert not inside._host._places

"""The engine `sglang` on a tiny model: one running SGLang for the whole file, which its last test kills.

What is compared with transformers is in the conformance suite; here is what only this engine does.
"""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rlinf_workers import WorkersError
from rlinf_workers.engines.sglang import engine as engine_module, srt
from rlinf_workers.testing import engines
from served_checks import check_pause_and_suspension, take_all

pytestmark = pytest.mark.minimum
NAMES = [check.__name__ for check in engines.ENGINE_CHECKS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return engines.tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(model):
    engine = engine_module.SGLangEngine(
        model, torch.device("cpu"), max_prompt_tokens=engines.WIDTH, max_batch_sequences=engines.MAX_SEQUENCES
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(running, model, monkeypatch):
    """As it was when it was started: with the model's own weights, which are of no version."""
    load(running, list(load_file(f"{model.folder}/model.safetensors").items()))
    running.weights_received(-1)
    monkeypatch.setattr(running, "close", lambda: None)
    return running


def load(engine, named_tensors):
    """Weights by SGLang's own way, whole tensors of Hugging Face names."""

    async def update():
        manager = engine._server.manager
        tensors = [srt.MultiprocessingSerializer.serialize(named_tensors)]
        for method, request in (
            (manager.begin_weight_update, srt.BeginWeightUpdateReqInput(selector="all")),
            (
                manager.update_weights_from_tensor,
                srt.UpdateWeightsFromTensorReqInput(serialized_named_tensors=tensors, flush_cache=False),
            ),
            (manager.end_weight_update, srt.EndWeightUpdateReqInput()),
        ):
            succeeded, message, *_ = await method(request, None)
            assert succeeded, message

    engine._server.run(update())


@pytest.mark.parametrize("check", engines.ENGINE_CHECKS, ids=NAMES)
def test_it_conforms(check, engine, model):
    check(lambda **_: engine, model)


def cached_tokens(engine):
    """Lets an engine tell how many prompt tokens of each request came from the prefix cache."""
    cached, generate = [], engine._server.engine.async_generate

    async def counting_generate(**request):
        output = await generate(**request)
        cached.append((request["sampling_params"]["max_new_tokens"], output["meta_info"]["cached_tokens"]))
        return output

    return cached, counting_generate


def test_a_groups_prompt_is_computed_once_and_forgotten_with_its_weights(engine, monkeypatch):
    cached, counting_generate = cached_tokens(engine)
    monkeypatch.setattr(engine._server.engine, "async_generate", counting_generate)
    prompts, sampling = engines.prompts_of([8]), replace(engines.SAMPLING, max_new_tokens=2)
    for first in (0, 7):  # the second time the whole prompt but its last token is there
        cached.clear()
        engines.sample(engine, prompts, sampling)
        assert cached[0] == (0, first) and cached[1:] == [(2, 7)] * 4
    engine.weights_received(9)
    cached.clear()
    engines.sample(engine, prompts, sampling)
    assert cached[0] == (0, 0), "a prefix of earlier weights was used"


def test_weights_that_come_while_completions_run_are_served_from_their_next_token_on(engine):
    sampling = replace(engines.GREEDY, max_new_tokens=40)
    whole = engines.sample(engine, engines.prompts_of([4]), sampling)
    engine.submit(engines.prompts_of([4]), sampling, seed=1, step=0)
    engine.weights_received(3)  # the same weights, whose completions have to be the same
    (again,) = engine.finished()
    assert again.policy_version in (-1, 3), "a token may have been sampled before they came"
    assert again.token_ids.tolist() == whole[0].token_ids.tolist()
    assert (again.logprobs - whole[0].logprobs).abs().max() < 1e-5
    assert engines.sample(engine, engines.prompts_of([4]), sampling)[0].policy_version == 3


def test_a_pause_and_a_suspension_change_no_token(engine):
    check_pause_and_suspension(engine)


def test_a_completion_may_use_the_models_context_to_its_last_position(engine):
    sampling = replace(engines.GREEDY, max_new_tokens=56)  # of 64 positions
    (part,) = engines.sample(engine, engines.prompts_of([8]), sampling)
    assert int(part.loss_mask.sum()) == 56 or not part.truncated[0]


def test_a_sequence_that_the_cache_cannot_hold_is_refused_with_what_to_do(engine):
    with pytest.raises(WorkersError, match=r"8 \+ 80 = 88 tokens, and SGLang accepts .*engine_options.mem_fraction"):
        engine.submit(engines.prompts_of([8]), replace(engines.SAMPLING, max_new_tokens=80), seed=1, step=0)
    with pytest.raises(ValueError, match=r"prompt 0 has 9 tokens; max_prompt_tokens allows 8"):
        engine.submit(engines.prompts_of([9]), engines.SAMPLING, seed=1, step=0)
    assert engine.finished() == []


def test_a_request_that_sglang_refuses_is_an_error_of_the_stage(engine):
    engine.submit(engines.prompts_of([3]), replace(engines.SAMPLING, group_size=1, temperature=-1.0), seed=1, step=0)
    with pytest.raises(ValueError, match="temperature"):
        engine.finished()
    engine._capacity.end(0, 0, 1)


def test_a_killed_process_is_named_at_once_and_nothing_is_left(running):
    (process,) = running._server._processes
    running.submit(engines.prompts_of([3] * 4), replace(engines.SAMPLING, max_new_tokens=40), seed=1, step=0)
    os.kill(process.pid, signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(WorkersError, match=rf"scheduler process 0 of 1 \(pid {process.pid}\) ended with signal 9"):
        take_all(running)
    assert time.monotonic() - start_s < 5
    for use in (lambda: running.submit([], engines.SAMPLING, seed=1, step=0), running.onload, running.offload):
        with pytest.raises(WorkersError, match="ended with signal 9"):
            use()
    assert not os.path.exists(f"/proc/{process.pid}")

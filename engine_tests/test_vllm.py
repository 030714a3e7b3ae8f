"""The engine `vllm` on a tiny model: one running vLLM for the whole file, which its last test kills."""

import os
import signal
from dataclasses import replace
from unittest import mock

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
import torch

from broken_loader import FAULT_FILE
from rlinf_comm import WeightMismatchError
from rlinf_workers import WorkersError
from rlinf_workers.engines.vllm import arguments
from rlinf_workers.engines.vllm.engine import VLLMEngine
from rlinf_workers.testing import engines
from served_checks import check_pause_and_suspension, take_all

NAMES = [check.__name__ for check in engines.ENGINE_CHECKS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return engines.tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128)  # heads of 32


@pytest.fixture(scope="module")
def running(model, tmp_path_factory):
    no_fault = tmp_path_factory.mktemp("fault") / "fault"
    no_fault.write_text("")
    own = {"worker_extension_cls": "broken_extension.BrokenExtension", "kv_cache_memory_bytes": 32 << 20}
    own |= {"max_num_seqs": engines.MAX_SEQUENCES, "max_num_batched_tokens": 20}  # long prompts are computed in parts
    with mock.patch.dict(arguments.FIXED, own), mock.patch.dict(os.environ, {FAULT_FILE: str(no_fault)}):
        engine = VLLMEngine(
            model, torch.device("cpu"), max_prompt_tokens=engines.WIDTH, max_batch_sequences=engines.MAX_SEQUENCES
        )
    yield engine
    engine.close()


@pytest.fixture
def engine(running, model, monkeypatch):
    """As it was when it was started: with the model's own weights, which are of no version."""
    running._server.run(running._server.engine.collective_rpc("rlinf_load", args=(model.folder,)))
    running.weights_received(-1)
    monkeypatch.setattr(running, "close", lambda: None)
    return running


@pytest.mark.parametrize("check", engines.ENGINE_CHECKS, ids=NAMES)
def test_it_conforms(check, engine, model):
    check(lambda **_: engine, model)


def test_a_pause_and_a_suspension_change_no_token(engine):
    check_pause_and_suspension(engine)


def test_log_probabilities_are_of_all_tokens_at_the_sampling_temperature(engine, model):
    """Although vLLM samples from the two likeliest alone, and computes those of a greedy request in the same batch."""
    sampling = replace(engines.SAMPLING, temperature=0.7, top_k=2)
    prompts = engines.prompts_of([5, 3])
    engine.submit(prompts[:1], sampling, seed=1, step=0)
    engine.submit(prompts[1:], engines.GREEDY, seed=1, step=0)
    reference = engines.build_model(model, torch.device("cpu"))
    while finished := engine.finished():
        for part in finished:
            temperature = 0.7 if part.index == prompts[0].index else 1.0
            for row, mask, logprobs in zip(part.token_ids, part.loss_mask, part.logprobs, strict=True):
                tokens = row[mask.bool()]
                ids = torch.cat([prompts[part.index].token_ids, tokens])
                logits = reference(ids[None]).logits[0, -len(tokens) - 1 : -1] / temperature
                expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
                assert (logprobs[: len(tokens)] - expected).abs().max() < 1e-5


def test_a_completions_noise_does_not_depend_on_other_prompts(engine):
    """Prompts of which vLLM computes a part at a time are sampled with the others meanwhile, in vain."""

    def sample(lengths):
        parts = engines.sample(engine, engines.prompts_of(lengths), engines.SAMPLING)
        rows = {
            (part.index, member): row[mask.bool()].tolist()
            for part in parts
            for member, row, mask in zip(part.members, part.token_ids, part.loss_mask, strict=True)
        }
        return [rows[0, member] for member in range(engines.SAMPLING.group_size)]

    assert sample([7]) == sample([7, 8, 6, 8, 7]) == sample([7, 3])


def test_a_wake_with_other_weights_is_refused_by_name(engine, monkeypatch):
    """On a CPU vLLM frees nothing when it sleeps; the tensor is changed meanwhile, as published bugs did."""
    monkeypatch.setattr(engine, "_gives_memory_back", True)
    engine.offload()
    engine.onload()
    (whole,) = engines.sample(engine, engines.prompts_of([4]), engines.GREEDY)
    engine.offload()
    damage = engine._server.engine.collective_rpc("rlinf_damage", args=("model.layers.1.mlp.down_proj.weight",))
    engine._server.run(damage)
    with pytest.raises(
        WeightMismatchError, match=r"engine process 0 .*model\.layers\.1\.mlp\.down_proj\.weight differ"
    ):
        engine.onload()
    engine._is_away = False
    engine._server.run(engine._server.engine.wake_up())
    assert whole.token_ids.numel()


def test_a_killed_process_is_named_at_once_and_nothing_is_left(running):
    (process,) = running._server._processes
    family = [process.pid, *(one.pid for one in psutil.Process(process.pid).children(recursive=True))]
    running.submit(engines.prompts_of([3] * 4), replace(engines.SAMPLING, max_new_tokens=40), seed=1, step=0)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkersError, match=rf"core process \(pid {process.pid}\) ended with signal 9"):
        take_all(running)
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in family)

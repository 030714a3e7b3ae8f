"""Adapters in SGLang or vLLM, whichever the venv has: the base comes once, A and B with each version. Tokens and
log-probabilities are those of the engine `huggingface` with the same adapter, and whatever is wrong is named."""

import random
from dataclasses import replace

import pytest
import torch

from faults import FaultyEngine, Verdict, flip_on_the_way, flip_served, lies
from rlinf_comm import WeightMismatchError
from rlinf_workers.engines import Completions, SamplingSettings
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.errors import SettingsRefused
from rlinf_workers.models.lora_settings import LoraSettings
from rlinf_workers.roles import Prompt
from rlinf_workers.testing.architectures import tiny_architecture
from served_checks import ENGINE
from trained_engine import LOGPROB_BOUND, PROMPTS, SIZES, TrainedEngine, make_engine

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = LoraSettings(rank=4, alpha=6.0, targets=TARGETS, base_digest="")
NUM_SYNCS = 4
NUM_FLIPS = 20
CAUGHT = Verdict(caught=True, names_tensors=True, names_process=True, names_version=True)
LONG = Prompt(index=3, token_ids=torch.arange(40) % 13 + 2, reference_answer="")
"""Longer than a block of the KV cache, so that a prefix of an earlier version would be found in it."""


def greedy(engine) -> dict[int, Completions]:
    prompts = [*PROMPTS, LONG]
    engine.submit(prompts, SamplingSettings(group_size=1, max_new_tokens=12, temperature=0.0), seed=1, step=0)
    parts: dict[int, Completions] = {}
    while len(parts) < len(prompts):
        parts |= {part.index: part for part in engine.finished()}
    return parts


def check_equals_huggingface(trained: TrainedEngine) -> None:
    reference = HuggingFaceEngine(trained.loaded, torch.device("cpu"), max_prompt_tokens=48)
    expected, actual = greedy(reference), greedy(trained.engine)
    for index, part in actual.items():
        length = int(part.loss_mask.sum())
        assert part.token_ids[0, :length].tolist() == expected[index].token_ids[0, :length].tolist()
        assert length == expected[index].loss_mask.sum()
        distance = (part.logprobs[0, :length] - expected[index].logprobs[0, :length]).abs().max()
        assert distance <= LOGPROB_BOUND


@pytest.mark.parametrize(
    ("name", "tp", "targets"),
    [("qwen2", 1, TARGETS), ("qwen3", 2, ("q_proj", "v_proj", "up_proj", "down_proj")), ("qwen3_moe", 1, TARGETS[:4])],
)
def test_tokens_are_those_of_huggingface_with_the_same_adapter_after_every_sync(name, tp, targets, tmp_path):
    """Also after the memory was released and allocated again, with and without a sync in between."""
    lora = LoraSettings(rank=4, alpha=6.0, targets=targets, base_digest="")
    trained = TrainedEngine(name, tmp_path, tp=tp, engine=ENGINE, adapter=lora)
    check_equals_huggingface(trained)
    trained.engine._gives_memory_back = True  # as on a GPU
    for number in range(NUM_SYNCS):
        trained.serve()
        check_equals_huggingface(trained)
        leave = trained.engine.discard if number % 2 else trained.engine.offload
        leave()
        trained.engine.onload()
        check_equals_huggingface(trained)
    trained.close()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    engine = FaultyEngine("qwen2", tmp_path_factory.mktemp("adapted"), engine=ENGINE, adapter=LORA)
    yield engine
    engine.close()


def test_whatever_is_wrong_with_base_or_adapter_is_named(adapted):
    """Flipped bits in what is served and on the way, and all that a loader may do, each followed by a correct sync."""
    choose = random.Random(7)
    adapted.serve()
    flips = [flip_served(adapted, choose) for _ in range(NUM_FLIPS)]
    flips += [flip_on_the_way(is_frozen=number % 2 > 0) for number in range(NUM_FLIPS)]
    assert {fault.is_frozen for fault in flips} == {False, True}
    for fault in [*flips, *lies(adapted)]:
        assert adapted.attempt(fault, choose) == CAUGHT, fault
        adapted.recover(fault)
    check_equals_huggingface(adapted)


def test_an_engine_that_scales_updates_otherwise_is_refused_by_its_layers(adapted, monkeypatch):
    monkeypatch.setattr(adapted._edge._receiver, "_adapter_scale", 3.0)
    adapted.publish()
    with pytest.raises(WeightMismatchError, match=r"multiplies the adapter's updates by 3\.0.*layers\.0\..*qkv_proj"):
        adapted.fill()()


def test_an_adapter_whose_targets_match_no_layer_is_refused_when_the_engine_starts(tmp_path):
    lora = LoraSettings(rank=4, alpha=6.0, targets=("query_key_value",), base_digest="")
    settings = tiny_architecture("qwen2", tmp_path, **SIZES[ENGINE])
    with pytest.raises(SettingsRefused, match="no linear layer query_key_value"):
        make_engine(ENGINE, replace(settings, adapter=lora), 1)

"""Weights into vLLM's own processes: its tokens are those of transformers after every sync, and whatever it would serve
that was not published is named before a prompt is taken."""

import random
from pathlib import Path

import pytest

from faults import FaultyEngine, Verdict, flip_on_the_way, flip_served, lies
from rlinf_workers.engines.vllm import arguments
from rlinf_workers.errors import SettingsRefused
from trained_engine import TrainedEngine

SHARED_MEMORY = Path("/dev/shm")
NUM_SYNCS = 20
NUM_FLIPS = 40
CAUGHT = Verdict(caught=True, names_tensors=True, names_process=True, names_version=True)


@pytest.mark.parametrize(("name", "tp"), [("qwen2", 1), ("qwen3", 1), ("llama", 1), ("qwen2", 2)])
def test_tokens_are_those_of_transformers_after_every_sync(name, tp, tmp_path):
    before = set(SHARED_MEMORY.glob("vllm*"))
    trained = TrainedEngine(name, tmp_path, tp=tp, engine="vllm")
    assert set(SHARED_MEMORY.glob("vllm*")) <= before, "left in memory if the engine is killed"
    assert trained.compare_tokens().holds
    for _ in range(NUM_SYNCS):
        trained.serve()
        assert trained.compare_tokens().holds
    trained.close()


def test_experts_are_served_and_what_is_wrong_is_named(tmp_path):
    """Flipped bits in what is served and on the way, tensors not updated, experts swapped or lost, each followed by a
    correct sync."""
    experts, choose = FaultyEngine("qwen3_moe", tmp_path, engine="vllm"), random.Random(7)
    for _ in range(NUM_SYNCS):
        experts.serve()
        assert experts.compare_tokens().holds
    flips = [fault for _ in range(NUM_FLIPS // 2) for fault in (flip_served(experts, choose), flip_on_the_way())]
    for fault in [*flips, *lies(experts)]:
        assert experts.attempt(fault, choose) == CAUGHT, fault
        experts.recover(fault)
    assert experts.compare_tokens().holds
    experts.close()


def test_a_model_that_vllm_computes_from_copies_of_its_weights_is_refused(tmp_path, monkeypatch):
    """As vLLM loads it by itself on a CPU. Experts: test_vllm_published.py."""
    monkeypatch.setattr(arguments, "PLAIN", "auto")
    copies = r"computes model\.embed_tokens, model\.layers\.0\.self_attn\.qkv_proj, .* from copies"
    with pytest.raises(SettingsRefused, match=copies):
        TrainedEngine("qwen2", tmp_path, engine="vllm")

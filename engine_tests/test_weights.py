"""Weights into SGLang's own processes: its tokens are those of transformers after every sync, and whatever it would
serve that was not published is named before a prompt is taken."""

import random

import pytest

from faults import FaultyEngine, Verdict, flip_on_the_way, flip_served, lies
from rlinf_comm import LayoutError, WeightMismatchError
from trained_engine import TrainedEngine

NUM_SYNCS = 20
NUM_FLIPS = 20
CAUGHT = Verdict(caught=True, names_tensors=True, names_process=True, names_version=True)


@pytest.mark.parametrize(("name", "tp"), [("qwen2", 1), ("qwen3", 1), ("llama", 1), ("qwen2", 2)])
def test_tokens_are_those_of_transformers_after_every_sync(name, tp, tmp_path):
    trained = TrainedEngine(name, tmp_path, tp=tp)
    check_tokens_of_many_syncs(trained)
    trained.close()


def check_tokens_of_many_syncs(trained):
    assert trained.compare_tokens().holds
    for _ in range(NUM_SYNCS):
        trained.serve()
        assert trained.compare_tokens().holds


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A Qwen3-MoE, whose loader may be broken."""
    engine = FaultyEngine("qwen3_moe", tmp_path_factory.mktemp("experts"))
    yield engine
    engine.close()


@pytest.mark.minimum
def test_experts_are_served_after_every_sync(experts):
    check_tokens_of_many_syncs(experts)


@pytest.mark.minimum
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("skip model.layers.1.self_attn.qkv_proj.weight", r"model\.layers\.1\.self_attn\.[qkv]_proj\.weight.*differ"),
        ("swap 0 3 model.layers.1.mlp.experts.w13_weight", r"model\.layers\.1\.mlp\.experts\.gate_up_proj.*differs"),
        ("flip 0 model.layers.1.self_attn.qkv_proj.weight 240", r"model\.layers\.1\.self_attn\.q_proj\.weight differs"),
        ("old", r"model\.embed_tokens\.weight.*differ"),
        (
            "replace model.layers.1.self_attn.qkv_proj.weight",
            r"model\.layers\.1\.self_attn\.qkv_proj\.weight have other addresses",
        ),
        ("nothing", r"was not filled"),
    ],
)
def test_a_loader_that_says_success_and_did_something_else_is_named(experts, fault, text):
    """The next sync is served again, by the same engine."""
    with experts.lying(fault):
        experts.publish()
        check = experts.fill()
    with pytest.raises(WeightMismatchError, match=text) as raised:
        check()
    assert f"version {experts.version}" in str(raised.value) and "engine process 0 (pid " in str(raised.value)
    experts.serve()
    assert experts.compare_tokens().holds


def test_what_is_wrong_is_named_and_what_is_right_is_served(experts):
    """Flipped bits in what is served and on the way, and all that a loader may do, each followed by a correct sync."""
    choose = random.Random(7)
    flips = [fault for _ in range(NUM_FLIPS // 2) for fault in (flip_served(experts, choose), flip_on_the_way())]
    for fault in [*flips, *lies(experts)]:
        assert experts.attempt(fault, choose) == CAUGHT, fault
        experts.recover(fault)
    assert experts.compare_tokens().holds


def test_parameters_that_sglang_has_padded_are_refused_by_name(tmp_path):
    """An MLP of 48 over two processes: SGLang's kernels on a CPU want 64."""
    with pytest.raises(LayoutError, match=r"qwen2, engine process 0: .*mlp\.down_proj\.weight is float32 \[64, 32\]"):
        TrainedEngine("qwen2", tmp_path, tp=2, intermediate_size=48)

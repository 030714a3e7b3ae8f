"""rlinf_comm.weights.executor against plain torch code that cuts as the engines do."""

import threading
from typing import Any

import pytest
import torch
from comm_references import megatron_rank, merged_rank

from rlinf_comm import LayoutError
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.weights import Layout, ReshardExecutor, TensorSpec, execute, reshard_plan
from rlinf_comm.weights.layouts import TransformerShape, megatron_layout, merged_layout

SHAPE = TransformerShape(
    num_layers=2, hidden=6, num_heads=4, num_kv_heads=2, head_dim=4, vocab=13, intermediate=8, num_experts=4,
    expert_intermediate=4, dense_layers=(0,), qkv_bias=True, qk_norm=True, dtype="float32",
)  # fmt: skip
MEGATRON: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 2, "ep": 2}


def weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in SHAPE.specs().items()}


def trainer_tensors(full):
    options = dict(MEGATRON, etp=1, te=True, experts="te_grouped", pad=-1.0, vocab_multiple=128)
    return [megatron_rank(full, SHAPE, rank=rank, **options) for rank in range(8)]


def engine_tensors(full, dtype=torch.float32):
    ranks = [
        merged_rank(full, SHAPE, tp=2, ep=2, etp=1, vocab_tp=2, rank=rank, pad=0.0, vocab_multiple=64)
        for rank in range(2)
    ]
    return [{name: tensor.to(dtype) for name, tensor in tensors.items()} for tensors in ranks]


def zeros_like(ranks):
    return [{name: torch.zeros_like(tensor) for name, tensor in tensors.items()} for tensors in ranks]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_what_the_engine_would_cut_itself(dtype, num_threads):
    full = weights()
    reshard = reshard_plan(megatron_layout(SHAPE, **MEGATRON), merged_layout(SHAPE, tp=2, ep=2, dtype=str(dtype)[6:]))
    expected = engine_tensors(full, dtype)
    served = zeros_like(expected)
    for _ in range(2):  # the second time with what was kept
        execute(reshard, trainer_tensors(full), served, num_threads=num_threads)
        assert_bitwise_equal(served, expected)
        full = {name: -tensor for name, tensor in full.items()}
        expected = engine_tensors(full, dtype)


def test_tensors_of_any_strides():
    full = weights()
    reshard = reshard_plan(megatron_layout(SHAPE, **MEGATRON), merged_layout(SHAPE, tp=2, ep=2))
    expected = engine_tensors(full)
    executor = ReshardExecutor(reshard, 1)

    def transposed(tensor):
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor

    sources = [{name: transposed(t) for name, t in rank.items()} for rank in trainer_tensors(full)]
    for own in (zeros_like(expected)[1], {name: transposed(t) for name, t in zeros_like(expected)[1].items()}):
        executor.run(sources, own)
        assert_bitwise_equal(own, expected[1])


def test_what_is_not_needed_may_be_missing():
    full = weights()
    reshard = reshard_plan(megatron_layout(SHAPE, **MEGATRON), merged_layout(SHAPE, tp=2, ep=2))
    executor = ReshardExecutor(reshard, 0)
    everything = trainer_tensors(full)
    needed = {rank: everything[rank] for rank in executor.src_ranks}
    assert set(needed) < set(range(8))
    own = zeros_like(engine_tensors(full))[0]
    executor.run(needed, own)
    assert_bitwise_equal(own, engine_tensors(full)[0])


def test_padding_keeps_its_value():
    full = weights()
    reshard = reshard_plan(megatron_layout(SHAPE, **MEGATRON), merged_layout(SHAPE, tp=1))
    own = {name: torch.full(spec.shape, 7.0) for name, spec in reshard.dst_buffers[0].items()}
    ReshardExecutor(reshard).run(trainer_tensors(full), own)
    embedding = own["model.embed_tokens.weight"]
    assert embedding.shape == (64, 6)
    assert torch.equal(embedding[:13], full["model.embed_tokens.weight"])
    assert torch.equal(embedding[13:], torch.full((51, 6), 7.0))


def test_one_executor_from_several_threads():
    """Two engines' parameters of different strides, at once: the kept program is one or the other's, never mixed."""
    specs = {"w": TensorSpec((64, 64), "float32")}
    executor = ReshardExecutor(reshard_plan(Layout.sharded(specs, 2), Layout.replicated(specs, 1)))
    whole = torch.arange(64 * 64, dtype=torch.float32).view(64, 64)
    sources = [{"w": half.contiguous()} for half in whole.chunk(2)]
    num_right = []

    def work(own):
        for _ in range(200):
            own.zero_()
            executor.run(sources, {"w": own})
            num_right.append(torch.equal(own, whole))

    threads = [threading.Thread(target=work, args=(own,)) for own in (torch.empty(64, 64), torch.empty(64, 64).t())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_right == [True] * 400


def small_case():
    specs = {"w": TensorSpec((4, 2), "float32")}
    reshard = reshard_plan(Layout.sharded(specs, 2), Layout.replicated(specs, 1))
    return reshard, [{"w": torch.ones(2, 2)}, {"w": torch.ones(2, 2)}], [{"w": torch.zeros(4, 2)}]


def test_what_does_not_fit_is_named():
    reshard, sources, destinations = small_case()
    with pytest.raises(LayoutError, match=r"w: source rank 1 has no such tensor"):
        execute(reshard, sources[:1], destinations)
    with pytest.raises(LayoutError, match=r"source rank 1: w: has the shape \(3, 2\), the layout says \(2, 2\)"):
        execute(reshard, [sources[0], {"w": torch.ones(3, 2)}], destinations)
    with pytest.raises(LayoutError, match=r"source rank 0: w: has the dtype float64"):
        execute(reshard, [{"w": torch.ones(2, 2, dtype=torch.float64)}, sources[1]], destinations)
    with pytest.raises(LayoutError, match=r"w: destination rank 0 has no such tensor"):
        execute(reshard, sources, [{}])
    with pytest.raises(LayoutError, match=r"tensors of 2 destination ranks for a plan with 1"):
        execute(reshard, sources, destinations * 2)
    with pytest.raises(LayoutError, match=r"destination rank 1"):
        ReshardExecutor(reshard, 1)


# --- tensors beside the layout ----------------------------------------------------------------------------------------


def test_a_tensor_beside_the_layout_is_refused_with_all_that_helps():
    reshard, sources, destinations = small_case()
    sources[1] |= {"mtp.norm": torch.ones(3), "v": torch.ones(2, 2)}
    with pytest.raises(LayoutError) as caught:
        execute(reshard, sources, destinations)
    assert str(caught.value) == (
        "source rank 1 has 2 tensors that its layout does not know and that would be neither moved nor attested: "
        "mtp.norm float32 [3], v float32 [2, 2]; the layout knows 1 there, the nearest to mtp.norm is w. "
        "Use a layout that has them, or name what is to be left out: leave_out=['mtp.norm', 'v'] "
        "(patterns with * are allowed)"
    )
    assert not destinations[0]["w"].any(), "nothing was written"
    with pytest.raises(LayoutError, match=r"destination rank 0 has 1 tensor that its layout does not know.*inv_freq"):
        ReshardExecutor(reshard).run(
            sources=small_case()[1], destination={**destinations[0], "inv_freq": torch.ones(2)}
        )


def test_what_is_named_is_left_out():
    reshard, sources, destinations = small_case()
    sources[1]["mtp.norm"] = torch.ones(3)
    destinations[0]["rope.inv_freq"] = torch.ones(2)
    execute(reshard, sources, destinations, leave_out=["mtp.*", "*.inv_freq"])
    assert_bitwise_equal(destinations[0], {"w": torch.ones(4, 2), "rope.inv_freq": torch.ones(2)})


def test_a_pattern_must_leave_something_out_and_nothing_of_the_layout():
    reshard, sources, destinations = small_case()
    sources[1]["mtp.norm"] = torch.ones(3)
    with pytest.raises(LayoutError, match=r"leave_out: '\*\.bias' matches no tensor of these sources and destinations"):
        execute(reshard, sources, destinations, leave_out=["mtp.*", "*.bias"])
    with pytest.raises(LayoutError, match=r"leave_out: '\*' matches w, which the layout of .* stores; use a narrower"):
        execute(reshard, sources, destinations, leave_out=["*"])
    with pytest.raises(LayoutError, match=r"leave_out='mtp.\*' is one text; give a list"):
        execute(reshard, sources, destinations, leave_out="mtp.*")
    with pytest.raises(LayoutError, match="tensors of source rank 2; the plan has 2 source ranks"):
        execute(reshard, [*sources, {}], destinations, leave_out=["mtp.*"])

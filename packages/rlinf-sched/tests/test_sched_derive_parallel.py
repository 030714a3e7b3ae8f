"""What training over several devices loses, against schedules that are played and counts made by hand."""

from itertools import pairwise

import numpy as np
import pytest

from rlinf_sched import InstanceProfile, ItemCosts
from rlinf_sched.derive import Lengths, find_gpu, find_model, train_profile
from rlinf_sched.derive.parallel import InstanceLayout, bubble_s, exchange_s, layouts, longest_share, reduction_s
from rlinf_sched.derive.training import MOE_UTILISATION, _item_s, sequence_arguments

H100 = find_gpu("H100")
QWEN_7B, QWEN_MOE = find_model("Qwen2.5-7B"), find_model("Qwen3-30B-A3B")
LENGTHS = Lengths(mean_tokens=4000, limit_tokens=16_000, group_size=8)


def instances(model: str, **changes) -> dict[tuple[int, int], InstanceProfile]:
    arguments = sequence_arguments(LENGTHS, max_items=512)
    profile = train_profile(find_model(model), H100, **{**arguments, **changes})
    return {(one.num_devices, one.num_ranks): one for one in profile.instances}


@pytest.mark.parametrize("num_ranks", [2, 4, 16, 64])
def test_the_longest_rank_against_drawn_minibatches(num_ranks: int) -> None:
    costs = LENGTHS.total_costs
    drawn = costs.draw(128 * 2000, seed=0).reshape(2000, num_ranks, -1).sum(axis=2)
    assert longest_share(costs, 128, num_ranks) == pytest.approx((drawn.max(axis=1) / drawn.mean()).mean(), rel=0.03)


def test_equal_items_and_a_single_rank_wait_for_nobody() -> None:
    assert longest_share(ItemCosts(), 16, 8) == longest_share(LENGTHS.total_costs, 16, 1) == 1.0


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_bubble_is_what_a_played_pipeline_waits(num_stages: int) -> None:
    """Each micro-batch takes as long on each stage; the slowest is among them."""
    seconds = np.random.default_rng(1).uniform(0.5, 1.0, 40)
    free = np.zeros(num_stages)
    for one in seconds:
        done = 0.0
        for stage in range(num_stages):
            done = free[stage] = max(free[stage], done) + one
    layout = InstanceLayout(width=1, num_stages=num_stages)
    assert free[-1] == pytest.approx(seconds.sum() + bubble_s(layout, seconds.max()))


@pytest.mark.parametrize("num_chunks", [2, 4])
def test_chunks_make_the_bubble_of_a_played_pipeline_shorter(num_chunks: int) -> None:
    """A stage computes as many micro-batches of a chunk as there are stages, then those of the next chunk."""
    num_stages, num_micro_batches, seconds = 4, 16, 1.0
    order = [
        (first + micro_batch, chunk)
        for first in range(0, num_micro_batches, num_stages)
        for chunk in range(num_chunks)
        for micro_batch in range(num_stages)
    ]
    ended: dict[tuple[int, int, int], float] = {}
    free = np.zeros(num_stages)
    for micro_batch, chunk in order:
        before = ended.get((micro_batch, chunk - 1, num_stages - 1), 0.0)
        for stage in range(num_stages):
            before = free[stage] = max(free[stage], before) + seconds / num_chunks
            ended[micro_batch, chunk, stage] = before
    layout = InstanceLayout(width=1, num_stages=num_stages, num_chunks=num_chunks)
    assert free[-1] == pytest.approx(num_micro_batches * seconds + bubble_s(layout, seconds))


def test_an_exchange_by_counting_who_gets_a_token() -> None:
    """128 experts over 32 devices of four nodes: of a token's 8 copies one lands on each 4 devices."""
    copies = np.zeros(4)
    for device in range(32):
        copies[device // 8] += 8 / 32
    assert copies[0] == 2
    sent = 6 * 48 * 2048 * 2
    between_s = sent * copies[1:].sum() / (0.86 * 50e9)
    assert exchange_s(QWEN_MOE, H100, 32, passes=6) == pytest.approx(between_s)
    in_node_s = sent * 8 * 7 / 8 / (0.95 * 450e9)
    assert exchange_s(QWEN_MOE, H100, 8, passes=6) == pytest.approx(in_node_s)
    assert exchange_s(QWEN_MOE, H100, 1, passes=6) == 0


def test_a_node_trains_experts_at_its_public_rate() -> None:
    """12,040 tokens/s on each H100 with sequences of 4,096, without recomputation (NeMo AutoModel)."""
    arithmetic_s = 3 * QWEN_MOE.forward_flops(2048) / (MOE_UTILISATION * H100.flops_per_s)
    assert 1 / (arithmetic_s + exchange_s(QWEN_MOE, H100, 8, passes=4)) == pytest.approx(12_040, rel=0.02)


def test_a_reduction_is_bound_by_the_ports_of_a_node() -> None:
    num_bytes = 6 * QWEN_7B.num_parameters
    assert reduction_s(QWEN_7B, H100, 8, 1) == 0
    # one instance in each of two nodes: each device has a port of its own
    assert reduction_s(QWEN_7B, H100, 8, 2) == pytest.approx(num_bytes / 8 / 2 / (0.86 * 50e9))
    # eight instances in each: a ring has the eight ports of the node, and all bytes
    assert reduction_s(QWEN_7B, H100, 1, 16) == pytest.approx(num_bytes * 15 / 16 / (8 * 0.86 * 50e9))
    assert reduction_s(QWEN_7B, H100, 1, 8) == pytest.approx(num_bytes * 7 / 8 / (0.95 * 450e9))


def test_experts_over_four_nodes_cost_more_than_a_pipeline_over_them() -> None:
    """Device-seconds of a token and of a step of 512 groups: an instance of 32 devices is no way around the network."""
    token_s = {
        layout.width: layout.num_devices
        * _item_s(QWEN_MOE, H100, layout, 4 * QWEN_MOE.forward_flops(3000), 1, passes=6)
        for layout in (InstanceLayout(width=8, num_stages=1), InstanceLayout(width=32, num_stages=1))
    }
    assert token_s[32] > 1.5 * token_s[8]
    trained = instances("Qwen3-30B-A3B")
    step_s = {size: size * (trained[size, 1].seconds(512) + trained[size, 1].step_s) for size in (8, 32)}
    assert step_s[8] < step_s[32] < 1.3 * step_s[8]


def test_only_whole_layers_and_heads_are_shared_out() -> None:
    assert {(one.width, one.num_stages) for one in layouts(QWEN_7B, 8)} == {(1, 8), (2, 4), (4, 2)}
    assert [one.num_stages for one in layouts(QWEN_7B, 128)] == []  # 4 KV heads, 28 layers
    assert InstanceLayout(width=32, num_stages=1) in layouts(QWEN_MOE, 32)
    assert InstanceLayout(width=8, num_stages=4) in layouts(QWEN_MOE, 32)


def test_a_pipeline_is_as_slow_as_its_stage_with_most_layers() -> None:
    even, uneven = (
        _item_s(QWEN_7B, H100, InstanceLayout(width=1, num_stages=stages), 1e12, 1, passes=0) for stages in (4, 8)
    )
    assert uneven / even == pytest.approx((4 / 28) / (7 / 28))  # 28 layers: stages of 7, and of 3 or 4


def test_more_ranks_lose_more_and_a_pipeline_waits() -> None:
    trained = instances("Qwen2.5-7B")
    seconds = [trained[4, num_ranks].seconds(1) for num_ranks in (1, 2, 4, 8, 16)]
    assert all(a < b for a, b in pairwise(seconds))
    assert trained[8, 1].step_s > 0 == trained[1, 1].step_s  # four heads: eight devices are a pipeline, one is none

"""What a step computes a second, and the share of the peak that its stages reach."""

from dataclasses import replace

import pytest

from rlinf.loop.throughput import Throughput, without_totals
from rlinf.machine import InstalledGpu
from rlinf_sched import Plan, StagePlan
from rlinf_sched.derive import find_model

SHAPE = find_model("Qwen2.5-7B")
PEAK = 989e12
H100 = InstalledGpu(name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30)
TRAINER = StagePlan(stage="actor", devices=(0, 1), num_ranks=2, granularity=0, offload=True, turn=1)
SERVER = StagePlan(stage="rollout", devices=(0, 1), num_ranks=1, granularity=0, offload=True, turn=0)
PLAN = Plan(flow="grpo", mode="collocated", stages=(SERVER, TRAINER), reason="by hand")
TOTALS = {
    "computed_tokens/rollout": 4e5,
    "attended_tokens/rollout": 4e8,
    "computed_tokens/actor": 1.2e6,
    "attended_tokens/actor": 1.2e9,
}
METRICS = {"reward/mean": 0.5, **TOTALS}


def test_the_share_of_the_peak_counts_every_device_and_no_sharing_rank_twice():
    throughput = Throughput({"rollout": SHAPE, "actor": SHAPE}, [H100, H100])
    operations = 1.2e6 * (2 * SHAPE.num_matmul_parameters + 4 * 28 * 28 * 128 * 1000)  # 28 layers, 28 heads of 128
    # Two ranks compute for 30 s each; one server of two devices for 10 s.
    measured = throughput.of(METRICS, {"actor": 60.0, "rollout": 10.0}, 50.0, PLAN)
    assert measured == pytest.approx(
        {
            "perf/tokens_per_s": 4e5 / 50 / 2,
            "perf/mfu/actor": operations / (60 * PEAK),
            "perf/mfu/rollout": operations / 3 / (20 * PEAK),
        }
    )
    shared = replace(PLAN, stages=(SERVER, replace(TRAINER, num_ranks=4)))
    four = throughput.of(METRICS, {"actor": 120.0, "rollout": 10.0}, 50.0, shared)
    assert four["perf/mfu/actor"] == pytest.approx(measured["perf/mfu/actor"])


@pytest.mark.parametrize(
    "gpus", [[], [H100, replace(H100, name="NVIDIA A100-SXM4-80GB")], [replace(H100, name="Vega")]]
)
def test_where_no_peak_is_known_tokens_are_counted_alone(gpus):
    measured = Throughput({"actor": SHAPE}, gpus).of(METRICS, {"actor": 60.0}, 50.0, PLAN)
    assert measured == {"perf/tokens_per_s": pytest.approx(4000)}
    assert without_totals(METRICS) == {"reward/mean": 0.5}


def test_a_stage_that_computed_nothing_has_no_share():
    throughput = Throughput({"actor": SHAPE}, [H100])
    assert throughput.of({"reward/mean": 0.0}, {"actor": 1.0, "rollout": 2.0}, 5.0, PLAN) == {}

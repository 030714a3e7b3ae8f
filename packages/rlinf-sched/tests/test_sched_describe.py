"""Text for people, word for word."""

from dataclasses import replace

import pytest

from rlinf_sched import Cluster, FlowError, FlowGraph, PlanError, Stage, describe_plan, flow_diagram, plan_for_mode


def test_describe_plan(grpo):
    cluster = Cluster.cpu_slots(4, memory_bytes=1 << 30)
    plan = plan_for_mode(grpo, cluster, "hybrid", devices={"rollout": [0, 1, 3]})
    assert describe_plan(plan, grpo, cluster) == (
        "flow grpo, mode hybrid\n"
        "cluster: 1 node, 4 devices: 4 x CPU slot (cpu, 1.0 GiB)\n"
        "reason: rule for hybrid: generation spread over the devices and pipelined, then training on all of them; "
        "chosen by the user: devices.rollout=[0, 1, 3]\n"
        "\n"
        "stage      worker     devices  ranks  granularity  offload  turn\n"
        "----------------------------------------------------------------\n"
        "rollout    rollout    0-1, 3   3      1            yes      0\n"
        "reference  reference  2-3      2      1            yes      1\n"
        "reward     reward     host     1      1            no       2\n"
        "actor      actor      0-3      4      whole batch  yes      3\n"
    )


def test_describe_plan_refuses_a_plan_that_does_not_fit(grpo):
    cluster = Cluster.cpu_slots(4, memory_bytes=1 << 30)
    plan = plan_for_mode(grpo, cluster, "hybrid")
    with pytest.raises(PlanError, match="does not exist"):
        describe_plan(plan, grpo, Cluster.cpu_slots(2, memory_bytes=1))


def test_diagram(embodied):
    graph = replace(embodied, feeds=("actions",))
    assert flow_diagram(graph) == (
        "flowchart LR\n"
        '  feed(["driver"])\n'
        '  s0["env<br/>cycle"]\n'
        '  s1["policy<br/>rollout<br/>cycle"]\n'
        '  s2["actor<br/>trains"]\n'
        '  feed -->|"actions"| s0\n'
        '  s1 -->|"actions"| s0\n'
        '  s0 -->|"observations"| s1\n'
        '  s1 -->|"trajectories"| s2\n'
        '  s2 -. "weights" .-> s1\n'
    )


def test_diagram_draws_groups_of_several_stages_and_escapes_names():
    graph = FlowGraph(
        name="f",
        stages=(
            Stage(name="log#1", worker='the "actor"', role="log#1", reads=("a<b",), writes=("x",), needs_device=False),
            Stage(name="train", worker='the "actor"', role="train", reads=("x",), writes=("out",), needs_device=False),
        ),
        feeds=("a<b",),
        collects=("out",),
    )
    assert flow_diagram(graph) == (
        "flowchart LR\n"
        '  feed(["driver"])\n'
        '  subgraph g0["the #quot;actor#quot;"]\n'
        '    s0["log#35;1<br/>host"]\n'
        '    s1["train<br/>host"]\n'
        "  end\n"
        '  collect(["driver"])\n'
        '  feed -->|"a#lt;b"| s0\n'
        '  s0 -->|"x"| s1\n'
        '  s1 -->|"out"| collect\n'
    )


def test_diagram_refuses_an_invalid_flow():
    with pytest.raises(FlowError, match="no stages"):
        flow_diagram(FlowGraph(name="f", stages=()))

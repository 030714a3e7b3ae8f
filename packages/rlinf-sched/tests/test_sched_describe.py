"""Text for people, word for word."""

from dataclasses import replace

import pytest

from rlinf_sched import FlowError, FlowGraph, Stage, flow_diagram


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

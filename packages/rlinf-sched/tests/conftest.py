"""Flows that several test files use: a reasoning flow, an embodied one with a cycle, and random ones."""

import pathlib
import sys

import pytest

from rlinf_sched import FlowGraph, Stage, WeightEdge

sys.path.append(str(pathlib.Path(__file__).parent))  # for the references beside the tests


@pytest.fixture
def grpo() -> FlowGraph:
    return FlowGraph(
        name="grpo",
        stages=(
            Stage(name="rollout", worker="rollout", role="rollout", reads=("prompts",), writes=("samples",)),
            Stage(name="reference", worker="reference", role="reference", reads=("samples",), writes=("referenced",)),
            Stage(
                name="reward",
                worker="reward",
                role="reward",
                reads=("referenced",),
                writes=("scored",),
                needs_device=False,
            ),
            Stage(name="actor", worker="actor", role="actor", reads=("scored",), trains=True, item_multiple=4),
        ),
        weight_edges=(WeightEdge(source="actor", target="rollout"),),
        feeds=("prompts",),
    )


@pytest.fixture
def embodied() -> FlowGraph:
    return FlowGraph(
        name="embodied",
        stages=(
            Stage(name="env", worker="env", role="env", reads=("actions",), writes=("observations",), dispatch="key"),
            Stage(
                name="policy",
                worker="policy",
                role="rollout",
                reads=("observations",),
                writes=("actions", "trajectories"),
            ),
            Stage(name="actor", worker="actor", role="actor", reads=("trajectories",), trains=True, whole_batch=True),
        ),
        weight_edges=(WeightEdge(source="actor", target="policy"),),
    )

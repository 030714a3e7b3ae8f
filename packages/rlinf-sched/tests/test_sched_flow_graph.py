"""Flow graphs: queries, turns, every mistake a user can make, JSON."""

import json
from dataclasses import replace

import pytest

from rlinf_sched import FlowError, FlowGraph, SchedError, Stage, WeightEdge
from rlinf_sched.flow_graph import MAX_STALENESS


def stage(name, reads=(), writes=(), **more):
    return Stage(**{"name": name, "worker": name, "role": name, "reads": reads, "writes": writes, **more})


def flow(*stages, **more):
    return FlowGraph(name="f", stages=stages, **more)


def mistake(graph):
    with pytest.raises(FlowError) as caught:
        graph.validate()
    return str(caught.value)


def test_queries(grpo, embodied):
    grpo.validate()
    assert grpo.channels == ("prompts", "samples", "referenced", "scored")
    assert grpo.writers("samples") == ("rollout",)
    assert grpo.readers("samples") == ("reference",)
    assert grpo.writers("prompts") == ()
    assert grpo.workers == {name: (name,) for name in ("rollout", "reference", "reward", "actor")}
    assert grpo.generation_groups == ("rollout", "reference")
    assert grpo.training_groups == ("actor",)
    assert grpo.stage("reward").needs_device is False
    assert embodied.generation_groups == ("env", "policy")


def test_a_group_that_trains_in_one_stage_is_on_the_training_side_with_all_its_stages():
    graph = flow(
        stage("logprobs", reads=("a",), writes=("b",), worker="actor"),
        stage("values", reads=("b",), writes=("c",), role="critic"),
        stage("train", reads=("c",), worker="actor", trains=True),
        feeds=("a",),
    )
    graph.validate()
    assert graph.training_groups == ("actor", "values")
    assert graph.generation_groups == ()
    assert graph.workers == {"actor": ("logprobs", "train"), "values": ("values",)}


def test_turns_follow_the_flow_and_a_cycle_is_one_turn(grpo, embodied):
    assert grpo.turns() == (("rollout",), ("reference",), ("reward",), ("actor",))
    assert grpo.cycles() == ()
    assert embodied.turns() == (("env", "policy"), ("actor",))
    assert embodied.cycles() == (("env", "policy"),)


def test_turns_do_not_depend_on_the_order_of_declaration_where_channels_decide(grpo):
    backwards = replace(grpo, stages=grpo.stages[::-1])
    assert backwards.turns() == grpo.turns()


def test_several_writers_and_readers_of_one_channel_all_join():
    graph = flow(
        stage("last", reads=("x",)),
        stage("a", reads=("in",), writes=("x",)),
        stage("b", reads=("in",), writes=("x",)),
        stage("other", reads=("x",)),
        feeds=("in",),
    )
    graph.validate()
    assert graph.successors() == {"last": (), "a": ("last", "other"), "b": ("last", "other"), "other": ()}
    assert graph.turns() == (("a",), ("b",), ("last",), ("other",))


def test_a_stage_that_reads_its_own_channel_is_a_cycle_of_one():
    graph = flow(stage("agent", reads=("work",), writes=("work", "out")), feeds=("work",), collects=("out",))
    graph.validate()
    assert graph.turns() == (("agent",),)
    assert graph.cycles() == (("agent",),)


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (flow(), "no stages"),
        (flow(stage("a", reads=("x",)), stage("a", reads=("x",)), feeds=("x",)), "stage 'a' is declared 2 times"),
        (flow(stage("a", reads=("x",))), "channel 'x' has no writer but is read by 'a'"),
        (flow(stage("a", writes=("x",))), "channel 'x' has no reader but is written by 'a'"),
        (flow(stage("a", reads=("x",)), feeds=("x", "y")), "channel 'y' has no reader but is written by the driver"),
        (flow(stage("a", reads=("x",)), feeds=("x",), collects=("y",)), "is read by the driver (collects)"),
        (flow(stage("a", reads=("x",)), feeds=("x", "x")), "feeds names channel 'x' twice"),
        (flow(stage("a", writes=("x",)), collects=("x", "x")), "collects names channel 'x' twice"),
        (flow(stage("a", writes=("x",)), stage("b", reads=("x",)), collects=("x",)), "collected by the driver"),
        (flow(stage("a", reads=("x", "x")), feeds=("x",)), "reads names channel 'x' twice"),
        (flow(stage("a")), "reads and writes no channel"),
        (flow(stage("", reads=("x",)), feeds=("x",)), "name='' is empty"),
        (flow(stage("a", reads=("x ",)), feeds=("x ",)), "a channel is called 'x '"),
        (flow(stage("a", reads=("x",), dispatch="keys"), feeds=("x",)), "dispatch='keys'; did you mean 'key'?"),
        (flow(stage("a", reads=("x",), item_multiple=0), feeds=("x",)), "item_multiple=0 must be at least 1"),
        (
            flow(stage("a", reads=("x",), writes=("y",), worker="w"), stage("b", reads=("y",), worker="w",
                 needs_device=False), feeds=("x",)),
            "worker group 'w' mixes stages with a device (a) and without one (b)",
        ),
        (
            flow(stage("a", reads=("x",), writes=("y",), worker="w", devices_per_rank=1), stage("b", reads=("y",),
                 worker="w", devices_per_rank=2), feeds=("x",)),
            "worker group 'w': a.devices_per_rank=1, b.devices_per_rank=2, but its stages have the same ranks",
        ),
        (
            flow(stage("a", reads=("x",), writes=("x",), whole_batch=True), feeds=("x",)),
            "whole_batch=True but is part of the cycle a",
        ),
    ],
)  # fmt: skip
def test_mistakes_in_stages_and_channels(graph, text):
    assert text in mistake(graph)


@pytest.mark.parametrize(
    ("edges", "text"),
    [
        ([("actr", "rollout")], "no worker group 'actr'; did you mean 'actor'?"),
        ([("actor", "nobody")], "no worker group 'nobody'; allowed: rollout, reference, reward, actor"),
        ([("actor", "actor")], "from a worker group to itself"),
        ([("actor", "rollout"), ("actor", "rollout")], "declared twice"),
        ([("rollout", "actor")], "the two ends look swapped"),
        ([("reference", "rollout")], "set trains=True"),
    ],
)
def test_mistakes_in_weights(grpo, edges, text):
    bad = replace(grpo, weight_edges=tuple(WeightEdge(source=a, target=b) for a, b in edges))
    assert text in mistake(bad)


@pytest.mark.parametrize("steps", [-1, MAX_STALENESS + 1, 10**6])
def test_staleness_has_bounds(grpo, steps: int):
    """A million steps ahead would be simulated for twelve million steps."""
    assert mistake(replace(grpo, max_staleness=steps)) == (
        f"flow 'grpo': max_staleness={steps} must be from 0, synchronous, to 64"
    )
    replace(grpo, max_staleness=MAX_STALENESS).validate()


def test_a_misspelt_channel_gets_a_hint_and_both_ends_are_reported():
    graph = flow(stage("a", writes=("samples",)), stage("b", reads=("sample",)))
    text = mistake(graph)
    assert text.startswith("flow 'f' has 2 mistakes:\n  - ")
    assert "did you mean 'sample'?" in text
    assert "did you mean 'samples'?" in text


def test_a_string_for_channels_is_refused_before_it_falls_apart_into_letters():
    with pytest.raises(FlowError, match=r"reads='prompts' is a string; write reads=\('prompts',\)"):
        stage("a", reads="prompts")
    with pytest.raises(FlowError, match="writes='x' is a string"):
        stage("a", writes="x")


def test_an_unknown_stage_is_named_with_the_nearest(grpo):
    with pytest.raises(FlowError, match="no stage 'rolout'; did you mean 'rollout'"):
        grpo.stage("rolout")


def test_errors_are_value_errors():
    assert issubclass(FlowError, SchedError)
    assert issubclass(SchedError, ValueError)


def test_json_round_trip_is_exact_and_stable(grpo, embodied):
    for graph in (grpo, embodied):
        text = graph.to_json()
        assert FlowGraph.from_json(text) == graph
        assert FlowGraph.from_json(text).to_json() == text
        assert json.loads(text)["format"] == 1


def test_with_ambiguous_names_nothing_else_is_reported():
    twice = flow(stage("a", reads=("x",)), stage("a", reads=("y",)))
    assert mistake(twice) == "flow 'f': stage 'a' is declared 2 times; give each stage its own name"


def test_json_keeps_names_readable():
    text = flow(stage("stufe", reads=("größe",)), feeds=("größe",)).to_json()
    assert "größe" in text


def test_json_leaves_may_be_omitted_where_they_have_defaults():
    text = '{"format": 1, "name": "f", "stages": [{"name": "a", "worker": "a", "role": "actor", "reads": ["x"]}]}'
    assert FlowGraph.from_json(text).stages[0] == stage("a", reads=("x",), role="actor")


def test_json_names_the_place_of_a_mistake(grpo):
    tree = json.loads(grpo.to_json())
    tree["stages"][1]["reads"] = "samples"
    with pytest.raises(FlowError, match=r"flow\.stages\[1\]\.reads='samples' is a string; expected a list"):
        FlowGraph.from_json(json.dumps(tree))

"""PlannedFlow: what each rank is told, from a flow and its plan alone."""

from dataclasses import replace

import pytest

from rlinf_comm import ChannelAddress
from rlinf_sched import Cluster, Mode, WeightEdge, plan_for_mode
from rlinf_workers import Flow, Reader, StepContext, Worker, Writer
from rlinf_workers.execution.stage_calls import PlannedFlow
from rlinf_workers.testing.toy_flow import Scale, toy_flow

CLUSTER = Cluster.cpu_slots(4)


def address(name: str, descriptor: int) -> ChannelAddress:
    return ChannelAddress(name=name, creator_pid=1, creator_start_ticks=1, fd=descriptor, nonce=0)


ADDRESS = address("c", 0)
CONTEXT = StepContext(step=3, phase="train", seed=0, num_items=8)


def planned(flow: Flow, mode: Mode = "collocated", **choices) -> PlannedFlow:
    graph = flow.graph()
    return PlannedFlow(flow=flow, graph=graph, plan=plan_for_mode(graph, CLUSTER, mode, **choices))


EDGES = (WeightEdge(source="learn", target="scale"), WeightEdge(source="learn", target="other"))


def calls(flow: PlannedFlow, synced: tuple[WeightEdge, ...] = EDGES):
    addresses = {name: address(name, i) for i, name in enumerate((*flow.graph.channels, *flow.replica_channels))}
    return {
        (call.stage, rank): call for rank, _, call in flow.stage_calls(addresses, dict.fromkeys(synced, 5), CONTEXT)
    }


def num_partitions(flow: PlannedFlow, channel: str) -> int:
    return flow.port(channel, ADDRESS, other_end=()).num_partitions


def test_every_rank_of_every_stage_is_called_with_its_own_ports():
    by_rank = calls(planned(toy_flow(), num_ranks={"scale": 4, "learn": 2}))
    assert sorted(by_rank) == [("learn", 0), ("learn", 1), *(("scale", rank) for rank in range(4)), ("shift", 0)]
    scale, shift = by_rank["scale", 3], by_rank["shift", 0]
    assert (scale.method, scale.context) == ("scale", CONTEXT)
    assert [port.channel for port in scale.reads] == ["numbers"]
    assert [(port.channel, port.address) for port in scale.writes] == [("scaled", address("scaled", 1))]
    assert (shift.lease_turn, shift.offloads) == (None, False), "it shares no device"


def test_items_are_bound_to_ranks_by_dispatch_order_and_whole_batches_alone():
    flow = planned(toy_flow(), num_ranks={"scale": 4, "learn": 2}, granularity={"scale": 2})
    assert [num_partitions(flow, channel) for channel in ("numbers", "scaled", "shifted")] == [1, 1, 2]
    assert num_partitions(planned(toy_flow(), num_ranks={"scale": 4}), "numbers") == 4, "whole batches"
    by_rank = calls(flow)
    assert [by_rank["learn", rank].reads[0].partition for rank in (0, 1)] == [0, 1]
    assert {by_rank["scale", rank].reads[0].partition for rank in range(4)} == {0}
    assert by_rank["shift", 0].writes[0].num_partitions == 2


def test_writers_are_all_ranks_of_the_writing_stages_or_the_driver():
    flow = planned(toy_flow(), num_ranks={"scale": 4})
    assert [flow.num_writers(channel) for channel in ("numbers", "scaled", "shifted")] == [1, 4, 1]


def test_entries_are_as_small_as_the_readers_granularity():
    flow = planned(toy_flow(), granularity={"scale": 3})
    assert flow.port("numbers", ADDRESS, other_end=("scale",)).granularity == 3


def test_a_stage_serves_synced_edges_to_it_and_publishes_on_those_from_it():
    by_rank = calls(planned(toy_flow()))
    assert (by_rank["scale", 0].receives, by_rank["scale", 0].publishes) == ({"learn -> scale": 5}, ())
    assert (by_rank["learn", 0].receives, by_rank["learn", 0].publishes) == ({}, ("learn -> scale", "learn -> other"))
    by_rank = calls(planned(toy_flow()), synced=())
    assert (by_rank["scale", 0].receives, by_rank["learn", 0].publishes) == ({}, ())


def test_weights_may_be_lost_where_the_same_run_publishes_others():
    assert {stage: call.discards for (stage, _), call in calls(planned(toy_flow())).items()} == {
        "scale": True,
        "shift": False,
        "learn": False,
    }
    assert not calls(planned(toy_flow(), "disaggregated"))["scale", 0].discards
    evaluation = Flow("evaluation").workers_of(toy_flow(), "scale")
    evaluation.stage("scale", Scale.scale, reads="numbers", writes="scaled")
    flow = planned(evaluation)
    offloading = replace(flow.plan, stages=tuple(replace(stage, offload=True) for stage in flow.plan.stages))
    evaluated = calls(replace(flow, plan=offloading), EDGES[:1])["scale", 0]
    assert evaluated.offloads and evaluated.receives and not evaluated.discards


def test_weights_stay_for_another_stage_of_the_group():
    flow = toy_flow()
    flow.stage("again", Scale.scale, reads="scaled", writes="scaled twice", worker="scale")
    by_rank = calls(planned(flow))
    assert by_rank["scale", 0].offloads and not (by_rank["scale", 0].discards or by_rank["again", 0].discards)


def test_turns_that_share_devices_take_leases():
    assert planned(toy_flow()).leased_devices == {0: frozenset(range(4)), 2: frozenset(range(4))}
    assert planned(toy_flow(), "disaggregated").leased_devices == {}
    assert calls(planned(toy_flow()))["learn", 1].lease_turn == 2
    assert calls(planned(toy_flow(), "disaggregated"))["learn", 1].lease_turn is None


def test_items_go_to_replicas_and_their_first_ranks_tell_the_others():
    sizes = {"scale": 2, "learn": 2}
    flow = planned(toy_flow(), num_ranks_per_replica=sizes, granularity={"scale": 2})
    by_rank = calls(flow)
    assert [flow.num_writers(channel) for channel in ("scaled", *flow.replica_channels)] == [2, 2, 2]
    assert [num_partitions(flow, channel) for channel in ("numbers", "shifted")] == [1, 2]
    assert [by_rank["learn", rank].reads[0].partition for rank in range(4)] == [0, 0, 1, 1]
    names = [
        call.replica_channel and call.replica_channel.name
        for call in (by_rank["scale", 0], by_rank["scale", 1], by_rank["learn", 3])
    ]
    assert [flow.replica_channels[name] for name in names if name] == ["scale", "scale", "learn"]
    assert by_rank["shift", 0].replica_channel is None
    assert calls(planned(toy_flow()))["scale", 0].replica_channel is None, "a replica of one rank tells nobody"


class Ball(Worker):
    def serve(self, back: Reader, forth: Writer) -> None: ...

    def answer(self, forth: Reader, back: Writer, seen: Writer) -> None: ...


@pytest.fixture
def rally() -> PlannedFlow:
    """Two stages that feed each other, on lanes of one group."""
    flow = Flow("rally").worker("ball", Ball)
    flow.stage("serve", Ball.serve, worker="ball", reads="back", writes="forth")
    flow.stage("answer", Ball.answer, worker="ball", reads="forth", writes=("back", "seen"))
    return planned(flow, granularity={"serve": 1, "answer": 1})


def test_ports_inside_a_cycle_keep_the_lease_and_its_first_stage_starts_with_it(rally):
    by_rank = calls(rally)
    serve, answer = by_rank["serve", 0], by_rank["answer", 0]
    assert [port.of_own_turn for port in (*answer.reads, *answer.writes)] == [True, True, False]
    assert [port.of_own_turn for port in serve.reads] == [True], "it starts with the lease"
    scale = calls(planned(toy_flow()))["scale", 0]
    assert [port.of_own_turn for port in scale.reads] == [False], "it waits for items first"


def test_stages_of_one_group_have_lanes_of_their_own(rally):
    addresses = dict.fromkeys(rally.graph.channels)
    lanes = {call.stage: lane for _, lane, call in rally.stage_calls(addresses, {}, CONTEXT)}  # type: ignore[arg-type]
    assert lanes == {"serve": 0, "answer": 1}

"""Whose move it is, for graphs small enough to be drawn: a root cause is a sink or a circle."""

from dataclasses import replace

import pytest

from rlinf_workers.explaining.graph import WaitGraph, wait_graph
from rlinf_workers.explaining.snapshot import ChannelState, ProcessRecord, Snapshot, StageState
from rlinf_workers.launchers.base import OwnProcess, Wait

NOW_S = 1000.0
ROLLOUT = StageState(name="rollout", worker="rollout", reads=("prompts",), writes=("samples",), unfinished=(0, 1))
REWARD = StageState(name="reward", worker="reward", reads=("samples",), writes=("scored",), unfinished=(0,))
ACTOR = StageState(name="actor", worker="actor", reads=("scored",), unfinished=(0, 1))


def wait(who: str, kind, of: str = "", *, since_s: float = NOW_S - 60, **more) -> Wait:
    worker, _, stage = who.partition(" ")
    return Wait(waiter=worker, stage=stage, kind=kind, of=of, since_s=since_s, **more)


def graph(*waits: Wait, stages=(ROLLOUT, REWARD, ACTOR), halted=None, **more) -> WaitGraph:
    snapshot = Snapshot(taken_s=NOW_S, flow="grpo", began_s=NOW_S - 90, stages=stages, waits=waits, **more)
    return wait_graph(snapshot, halted)


def edges(wait_graph: WaitGraph) -> dict[str, tuple[str, ...]]:
    return {node.name: node.whose_move for node in wait_graph.nodes}


def causes(wait_graph: WaitGraph) -> list[tuple[str, tuple[str, ...], int]]:
    return [(root_cause.cause, root_cause.nodes, root_cause.num_waiting) for root_cause in wait_graph.root_causes]


def test_all_wait_for_the_one_that_does_not_wait():
    actors = [wait(f"actor/{rank} actor", "items", "scored") for rank in (0, 1)]
    rollouts = [wait(f"rollout/{rank} rollout", "room", "samples") for rank in (0, 1)]
    wait_graph = graph(*actors, *rollouts, feeding=("prompts",), collecting=())
    assert edges(wait_graph) == {
        "rollout/0 rollout": ("reward/0 reward",),
        "rollout/1 rollout": ("reward/0 reward",),
        "actor/0 actor": ("reward/0 reward",),
        "actor/1 actor": ("reward/0 reward",),
        "reward/0 reward": (),
        "driver: feeds prompts": ("rollout/0 rollout", "rollout/1 rollout"),
    }
    assert causes(wait_graph) == [("busy", ("reward/0 reward",), 5)]


def test_those_who_have_finished_are_nobody_to_wait_for():
    done = (replace(ROLLOUT, unfinished=()), REWARD)
    wait_graph = graph(wait("reward/0 reward", "items", "samples"), stages=done)
    assert causes(wait_graph) == [("nobody left", ("reward/0 reward",), 0)]
    assert causes(graph(wait("reward/0 reward", "items", "samples", since_s=NOW_S - 1), stages=done)) == []


def test_a_wait_of_the_run_before_is_none():
    wait_graph = graph(wait("reward/0 reward", "items", "samples", since_s=NOW_S - 91), stages=(ROLLOUT, REWARD))
    assert {root_cause.nodes[0] for root_cause in wait_graph.root_causes} == {
        "reward/0 reward",
        "rollout/0 rollout",
        "rollout/1 rollout",
    }


def test_a_halted_process_moves_nobody_whatever_it_said_last():
    """Its wait for items looks like one side of a circle."""
    waits = wait("reward/0 reward", "items", "samples"), wait("rollout/0 rollout", "room", "samples")
    stages = (replace(ROLLOUT, unfinished=(0,)), REWARD)
    assert causes(graph(*waits, stages=stages)) == [("deadlock", ("reward/0 reward", "rollout/0 rollout"), 0)]
    wait_graph = graph(*waits, stages=stages, halted={"reward/0": "stopped"})
    assert causes(wait_graph) == [("stopped", ("reward/0 reward",), 1)]


def test_a_worker_without_a_stage_that_is_gone_is_a_root_cause_too():
    assert causes(graph(stages=(REWARD,), halted={"actor/1": "gone"})) == [
        ("gone", ("actor/1",), 0),
        ("busy", ("reward/0 reward",), 0),
    ]


def test_a_circle_is_believed_once_its_waits_are_old():
    def circle(since_s: float) -> WaitGraph:
        ping = StageState(name="ping", worker="ping", reads=("pong",), writes=("ping",), unfinished=(0,))
        pong = StageState(name="pong", worker="pong", reads=("ping",), writes=("pong",), unfinished=(0,))
        waits = (wait("ping/0 ping", "items", "pong"), wait("pong/0 pong", "items", "ping", since_s=since_s))
        actor = wait("actor/0 actor", "items", "ping")
        return graph(*waits, actor, stages=(ping, pong, replace(ACTOR, unfinished=(0,))))

    assert causes(circle(NOW_S - 60)) == [("deadlock", ("ping/0 ping", "pong/0 pong"), 1)]
    assert causes(circle(NOW_S - 1)) == []


def test_a_circle_that_somebody_outside_may_end_is_none():
    mid = StageState(name="mid", worker="mid", reads=("loop",), writes=("loop",), unfinished=(0,))
    wait_graph = graph(
        wait("mid/0 mid", "items", "loop"), stages=(mid, replace(ROLLOUT, writes=("loop",), unfinished=(0,)))
    )
    assert causes(wait_graph) == [("busy", ("rollout/0 rollout",), 1)]


def test_a_lease_is_the_holders_move_or_of_those_who_leave():
    waits = wait("actor/0 actor", "lease", number=2)
    stages = (replace(ROLLOUT, unfinished=(0,)), replace(ACTOR, unfinished=(0,)))
    held = graph(waits, stages=stages, lease_holders={2: ("rollout/0 rollout",)})
    assert edges(held)["actor/0 actor"] == ("rollout/0 rollout",)
    left = graph(waits, stages=stages[1:], lease_holders={2: ("actor/0 actor",)}, leaving=("rollout/0",))
    assert causes(left) == [("busy", ("rollout/0 offload",), 1)]


def process(name: str) -> ProcessRecord:
    return ProcessRecord(name=name, host="here", pid=1, started_ticks=1, log_path="")


def test_weights_are_their_senders_move_whatever_its_stage_waits_for():
    """The version was published before the run; the trainer's stage waits for the items of those who serve it."""
    waits = (
        wait("rollout/0 rollout", "weights", "actor -> rollout", number=3),
        wait("reward/0 reward", "items", "samples"),
        wait("actor/0 actor", "items", "scored"),
    )
    stages = (replace(ROLLOUT, unfinished=(0,)), REWARD, replace(ACTOR, unfinished=(0,)))
    processes = tuple(process(name) for name in ("driver", "rollout/0", "actor/0", "actor/1", "actor/1 engine 7"))
    wait_graph = graph(*waits, stages=stages, processes=processes)
    senders = ("actor/0 sends weights to rollout", "actor/1 sends weights to rollout")
    assert edges(wait_graph)["rollout/0 rollout"] == senders
    assert causes(wait_graph) == [("busy", (sender,), 3) for sender in senders]
    stopped = graph(*waits, stages=stages, processes=processes, halted={"actor/1": "stopped"})
    assert causes(stopped)[0] == ("stopped", (senders[1],), 3)


def test_weights_that_an_engine_fills_are_the_move_of_its_processes_too():
    owed = (OwnProcess(pid=7, started_ticks=1),)
    weights_wait = wait("rollout/0 rollout", "weights", "actor -> rollout", number=3, processes=owed)
    wait_graph = graph(weights_wait, stages=(replace(ROLLOUT, unfinished=(0,)),), processes=(process("actor/0"),))
    assert edges(wait_graph)["rollout/0 rollout"] == ("rollout/0 engine 7", "actor/0 sends weights to rollout")
    checked = graph(replace(weights_wait, kind="check of weights"), stages=(replace(ROLLOUT, unfinished=(0,)),))
    assert edges(checked)["rollout/0 rollout"] == ("rollout/0 engine 7",)


def test_room_for_weights_is_the_servers_move():
    wait_graph = graph(wait("actor/0 actor", "room for weights", "actor -> rollout"), stages=(ROLLOUT, ACTOR))
    assert edges(wait_graph)["actor/0 actor"] == ("rollout/0 rollout", "rollout/1 rollout")


def test_a_door_is_the_move_of_the_process_that_keeps_the_channel():
    keepers = {"samples": "reward/0", "scored": "driver"}
    server_graph = graph(wait("rollout/0 rollout", "server", "samples"), stages=(ROLLOUT, REWARD), keepers=keepers)
    assert edges(server_graph)["rollout/0 rollout"] == ("reward/0 keeps channel samples",)
    full = wait("rollout/0 rollout", "room", "samples")
    assert edges(graph(full, keepers=keepers))["rollout/0 rollout"] == ("reward/0 reward",)
    wait_graph = graph(full, keepers=keepers, halted={"reward/0": "stopped"})
    assert edges(wait_graph)["rollout/0 rollout"] == ("reward/0 reward", "reward/0 keeps channel samples")
    assert wait_graph.root_causes[0].cause == "stopped"


def test_the_first_rank_of_a_replica_waits_for_the_others_to_hear_it():
    stages = (replace(ACTOR, num_ranks_per_replica=2, unfinished=(0, 1, 2, 3)),)
    assert edges(graph(wait("actor/2 actor", "other ranks"), stages=stages))["actor/2 actor"] == ("actor/3 actor",)


def collective(rank: int, operation: str, number: int, **more) -> Wait:
    what = {"number": number, "operation": operation, "ranks": (0, 1), **more}
    return wait(f"actor/{rank} actor", "collective", "all ranks", **what)


def test_a_collective_waits_for_the_ranks_that_are_not_in_it():
    wait_graph = graph(collective(0, "all-reduce", 17), wait("actor/1 actor", "items", "scored"))
    assert edges(wait_graph)["actor/0 actor"] == ("actor/1 actor",)
    assert causes(wait_graph)[0] == ("busy", ("reward/0 reward",), 2)


@pytest.mark.parametrize("other", [collective(1, "broadcast", 17), collective(1, "all-reduce", 18)])
def test_two_collectives_that_do_not_fit_are_a_mismatch(other):
    wait_graph = graph(collective(0, "all-reduce", 17), other, stages=(ACTOR,))
    assert causes(wait_graph) == [("mismatch", ("actor/0 actor", "actor/1 actor"), 0)]
    assert wait_graph.nodes[0].remark == f"actor/1 actor is in {other.target}"
    young = replace(other, since_s=NOW_S - 1)
    assert causes(graph(collective(0, "all-reduce", 17), young, stages=(ACTOR,))) == [], "it may be the next one"


def test_a_rank_that_ended_before_the_collective_of_the_others_is_a_mismatch():
    wait_graph = graph(collective(0, "all-reduce", 2), stages=(replace(ACTOR, unfinished=(0,)),))
    assert causes(wait_graph) == [("mismatch", ("actor/0 actor",), 0)]
    assert wait_graph.nodes[0].remark == "actor/1 actor has ended its stage"


def test_a_collective_in_which_all_are_is_not_a_mismatch():
    wait_graph = graph(collective(0, "all-reduce", 2), collective(1, "all-reduce", 2), stages=(ACTOR,))
    assert [root_cause.cause for root_cause in wait_graph.root_causes] == ["busy", "busy"]


def backends(rank: int, operation: str) -> Wait:
    return wait(f"actor/{rank} actor", "backend collective", operation=operation, ranks=(0, 1))


def test_who_is_inside_torch_distributed_waits_for_the_ranks_that_are_not():
    wait_graph = graph(backends(0, "all_gather_into_tensor"), stages=(ACTOR,))
    assert causes(wait_graph) == [("busy", ("actor/1 actor",), 1)]
    both = graph(backends(0, "all_gather_into_tensor"), backends(1, "wait_for_unshard"), stages=(ACTOR,))
    assert [root_cause.cause for root_cause in both.root_causes] == ["busy", "busy"], (
        "the same one, seen in two functions"
    )
    assert both.nodes[0].remark == "actor/1 actor is in wait_for_unshard"
    apart = graph(backends(0, "all_gather_into_tensor"), collective(1, "all-reduce", 17), stages=(ACTOR,))
    assert causes(apart) == [("mismatch", ("actor/0 actor", "actor/1 actor"), 0)]


def test_other_ranks_of_a_replica_wait_for_their_first():
    stages = (REWARD, replace(ACTOR, num_ranks_per_replica=2, unfinished=(0, 1, 2, 3)))
    waits = [wait("actor/1 actor", "first rank"), wait("actor/3 actor", "items", "scored")]
    moves = edges(graph(*waits, wait("actor/0 actor", "items", "scored"), stages=stages))
    assert moves["actor/1 actor"] == ("actor/0 actor",)
    assert moves["actor/3 actor"] == ("actor/2 actor",)
    assert moves["actor/0 actor"] == ("reward/0 reward",)


def test_two_stages_of_a_worker_take_turns():
    act = StageState(name="act", worker="policy", unfinished=(0,))
    value = StageState(name="value", worker="policy", unfinished=(0,))
    wait_graph = graph(wait("policy/0 act", "other stage"), stages=(act, value))
    assert causes(wait_graph) == [("busy", ("policy/0 value",), 1)]


@pytest.mark.parametrize("num_entries", [0, 3])
def test_the_driver_collects_or_waits_for_who_writes(num_entries):
    channels = (ChannelState(name="scored", num_entries=num_entries, num_bytes=0, capacity_bytes=1),)
    wait_graph = graph(stages=(REWARD,), collecting=("scored",), channels=channels)
    sinks = {"driver: collects scored", "reward/0 reward"} if num_entries else {"reward/0 reward"}
    assert {root_cause.nodes[0] for root_cause in wait_graph.root_causes} == sinks


def test_who_waits_for_processes_of_its_own_is_no_sink_and_they_are():
    owed = tuple(OwnProcess(pid=pid, started_ticks=1) for pid in (7, 8))
    waits = wait("rollout/0 rollout", "engine", processes=owed), wait("reward/0 reward", "items", "samples")
    stages = (replace(ROLLOUT, unfinished=(0,)), REWARD)
    wait_graph = graph(*waits, stages=stages)
    assert edges(wait_graph)["rollout/0 rollout"] == ("rollout/0 engine 7", "rollout/0 engine 8")
    assert causes(wait_graph) == [("busy", ("rollout/0 engine 7",), 2), ("busy", ("rollout/0 engine 8",), 2)]
    stopped = graph(*waits, stages=stages, halted={"rollout/0 engine 8": "stopped"})
    assert causes(stopped)[0] == ("stopped", ("rollout/0 engine 8",), 2)
    room = wait("actor/0 actor", "room for weights", "actor -> rollout")
    assert edges(graph(*waits, room, stages=(*stages, ACTOR)))["actor/0 actor"] == ("rollout/0 rollout",)

"""Channels between nodes: the ranks on the second slot of this machine count as those of another host."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rlinf_comm import Channel, ServerAddress
from rlinf_comm.wire import SECRET_VARIABLE
from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, StepContext
from rlinf_workers.execution.item_channels import ChannelPlace, ChannelSpec, FarChannel, HomeChannel, home_of
from rlinf_workers.spans import WaitTable
from rlinf_workers.testing.toy_flow import Number, reference_run, toy_flow

NUMBERS = [Number(index=i, value=float(i)) for i in range(10)]
NUM_STEPS = 3
ONE_NODE = Cluster.cpu_slots(2)
TWO_NODES = replace(ONE_NODE, devices=tuple(replace(device, node=device.index) for device in ONE_NODE.devices))


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    """Between hosts a job has one that was set."""
    monkeypatch.setenv(SECRET_VARIABLE, secrets.token_hex(32))


def context(step: int) -> StepContext:
    return StepContext(step=step, phase="train", seed=0, num_items=len(NUMBERS))


@pytest.mark.parametrize(
    ("mode", "choices"),
    [
        pytest.param("disaggregated", {"granularity": {"scale": 5}}, marks=pytest.mark.slow),
        ("disaggregated", {"granularity": {"scale": 1, "shift": 2, "learn": 3}}),
        pytest.param("hybrid", {"num_ranks": {"learn": 2}}, marks=pytest.mark.slow),
        pytest.param("collocated", {"num_ranks": {"learn": 2, "scale": 2}}, marks=pytest.mark.slow),
        pytest.param(
            "collocated",
            {"num_ranks": {"scale": 2, "learn": 2}, "num_ranks_per_replica": {"scale": 2, "learn": 2}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_nodes_give_the_reference_numbers(tmp_path, mode, choices):
    flow = toy_flow()
    plan = plan_for_mode(flow.graph(), TWO_NODES, mode, **choices)
    expected = reference_run([number.value for number in NUMBERS], NUM_STEPS)
    with Executor(cluster=TWO_NODES, log_folder=tmp_path, env_vars={"OMP_NUM_THREADS": "1"}) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        for step in range(NUM_STEPS):
            run = executor.run(flow, context=context(step), feeds={"numbers": NUMBERS}, timeout_s=600)
            assert run.metrics["learn/weight"] == expected[step]
        (opened,) = executor._open[flow.name].channel_sets
        servers = [place.server for place in opened.places.values()]
        assert any(servers), "no channel was used from another node"


def test_a_channel_lives_with_its_readers_and_each_item_crosses_once(tmp_path):
    flow = toy_flow()
    plan = plan_for_mode(flow.graph(), TWO_NODES, "disaggregated", granularity={"scale": 1, "shift": 1, "learn": 1})
    (of_scale,), (of_learn,) = (plan.stage(name).devices for name in ("scale", "learn"))
    assert of_scale != of_learn
    with Executor(cluster=TWO_NODES, log_folder=tmp_path, env_vars={"OMP_NUM_THREADS": "1"}) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        executor.run(flow, context=context(0), feeds={"numbers": NUMBERS}, timeout_s=600)
        (opened,) = executor._open[flow.name].channel_sets
        homes = {channel: place.node for channel, place in opened.places.items()}
        assert homes == {"numbers": of_scale, "scaled": 0, "shifted": of_learn}
        for channel, end in opened.channels.items():
            assert end.is_remote == (homes[channel] != 0)
            assert end.stats().num_put == len(NUMBERS)
        far = [home.server for home in opened.homes.values() if home.server is not None]
        assert [server.traffic.num_put + server.traffic.num_taken for server in far] == [len(NUMBERS)] * len(far)
        assert far or of_learn != 0


def test_on_one_node_there_is_no_door(tmp_path):
    flow = toy_flow()
    with Executor(cluster=ONE_NODE, log_folder=tmp_path, env_vars={"OMP_NUM_THREADS": "1"}) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), ONE_NODE, "disaggregated"))
        (opened,) = executor._open[flow.name].channel_sets
        assert all(place.server is None for place in opened.places.values())


@pytest.mark.parametrize(
    ("readers", "home"), [([], 0), ([1], 1), ([1, 1, 0], 1), ([0, 1], 0), ([2, 1], 1), ([0, 0, 1, 1, 1], 1)]
)
def test_a_channel_lives_where_most_of_its_readers_are(readers, home):
    assert home_of(readers) == home


def test_a_place_looks_different_from_here_and_there():
    home = HomeChannel(ChannelSpec(name="x", capacity_items=2, capacity_bytes=100, num_keys=1), 1, has_server=True)
    assert home.place.seen_from(1) == home.channel.address
    assert isinstance(home.place.seen_from(0), ServerAddress)
    closed = ChannelPlace(node=1, near=home.channel.address, server=None)
    with pytest.raises(AssertionError, match="has no server, and node 0 uses it"):
        closed.seen_from(0)


def test_what_waits_for_neither_items_nor_room_waits_for_the_door():
    home = HomeChannel(
        ChannelSpec(name="far", capacity_items=4, capacity_bytes=1 << 16, num_keys=1), 0, has_server=True
    )
    home.channel.reopen(1)
    assert home.server is not None
    table = WaitTable("rollout/0")
    targets: list[str] = []

    @contextmanager
    def asking() -> Iterator[None]:
        with table.waiting("server", "far") as wait:
            targets.append(wait.target)
            yield

    far = FarChannel(Channel.open(home.server.address), asking)
    far.put("first", key=0, timeout_s=0.0)
    far.put("second", key=0)
    assert [item.value for item in far.take(keys=None, timeout_s=0.0)] == ["first"]
    assert [item.value for item in far.take(keys=None, timeout_s=None)] == ["second"]
    far.close()
    assert targets == ["the process that has channel far"] * 3

"""Ranks of a replica: the others get what the first takes, put nothing, and pause where it pauses."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rlinf_comm import Channel
from rlinf_workers import WorkersError
from rlinf_workers.execution.ports import Pauses, Reader, Writer
from rlinf_workers.execution.replica import FirstRank, OtherRank
from rlinf_workers.execution.stage_calls import Port
from rlinf_workers.launchers.base import Identity

SECOND = Identity(role="actor", rank=3, num_ranks=4, num_ranks_per_replica=2)
FIRST = Identity(role="actor", rank=2, num_ranks=4, num_ranks_per_replica=2)


class Journal(Pauses):
    def __init__(self):
        self.waited_for = []

    @contextmanager
    def waiting(self, kind, channel, *, keeps_lease):
        self.waited_for.append(f"{kind} in {channel}")
        yield


class Rank:
    """One rank of a replica with a reader of one channel and a writer of another."""

    def __init__(self, identity: Identity, channels: dict[str, Channel], granularity: int) -> None:
        self.pauses = Journal()
        source, sink = (
            FirstRank(name, channels[name], channels["told"], identity)
            if identity.rank_in_replica == 0
            else OtherRank(name, channels["told"], identity)
            for name in ("in", "out")
        )
        self.reader = Reader(port(channels["in"], granularity), source, self.pauses)
        self.writer = Writer(port(channels["out"], 1), sink, self.pauses)

    def double(self) -> list[list[int]]:
        """The body of a stage."""
        chunks = []
        for chunk in self.reader:
            chunks.append(chunk)
            self.writer.put_many([(item, 2 * item) for item in chunk])
        return chunks


def port(channel: Channel, granularity: int) -> Port:
    return Port(
        channel=channel.name,
        address=channel.address,
        granularity=granularity,
        partition=0,
        num_partitions=1,
        ordered=False,
        of_own_turn=False,
    )


def channels(*, out_items: int = 64) -> dict[str, Channel]:
    return {"in": Channel.create("in"), "out": Channel.create("out", capacity_items=out_items), "told": told_channel()}


def told_channel() -> Channel:
    return Channel.create("told", num_keys=4)


def entries(channel: Channel) -> list[int]:
    return [item for entry in channel.take(max_items=64, timeout_s=0) for _, item in entry.value]


@pytest.mark.parametrize("granularity", [1, 3, 0])
def test_every_rank_sees_the_chunks_of_the_first_and_one_puts(granularity):
    by_name = channels()
    for start in (0, 2, 4):
        by_name["in"].put([(start, start), (start + 1, start + 1)])
    by_name["in"].close()
    first, second = Rank(FIRST, by_name, granularity), Rank(SECOND, by_name, granularity)
    assert first.double() == second.double()
    assert entries(by_name["out"]) == [0, 2, 4, 6, 8, 10], "once each"
    assert by_name["told"].stats().num_items == 0, "everything told was heard"
    assert first.pauses.waited_for == second.pauses.waited_for == []


def test_all_ranks_pause_where_the_first_has_to_wait():
    by_name = channels(out_items=1)
    first, second = Rank(FIRST, by_name, 2), Rank(SECOND, by_name, 2)
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(rank.double) for rank in (first, second)]
        by_name["in"].put([(0, 0), (1, 1)])
        by_name["in"].close()
        taken = [by_name["out"].take()[0].value for _ in range(2)]
        assert running[0].result(timeout=600) == running[1].result(timeout=60) == [[0, 1]]
    assert taken == [[(0, 0)], [(1, 2)]]
    assert second.pauses.waited_for == first.pauses.waited_for


def test_a_full_channel_pauses_the_second_rank_too():
    by_name = channels(out_items=1)
    by_name["in"].put([(0, 0), (1, 1)])
    by_name["in"].close()
    first, second = Rank(FIRST, by_name, 2), Rank(SECOND, by_name, 2)
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(rank.double) for rank in (first, second)]
        while first.pauses.waited_for != ["room in out"]:
            assert not running[0].done()
        assert not running[1].done()
        by_name["out"].take()
        for future in running:
            future.result(timeout=600)
    assert second.pauses.waited_for == ["room in out"]


@pytest.mark.parametrize("way", ["reads where the first puts", "puts where the first reads", "uses another channel"])
def test_a_rank_that_goes_another_way_is_named(way):
    by_name = channels()
    second = OtherRank("in", by_name["told"], SECOND)
    name, what = {
        "reads where the first puts": ("in", "put"),
        "puts where the first reads": ("in", []),
        "uses another channel": ("out", "put"),
    }[way]
    by_name["told"].put((name, what), key=SECOND.rank)
    doing = {"reads where the first puts": "reads from", "uses another channel": "reads from"}.get(way, "puts into")
    with pytest.raises(WorkersError, match=f"actor/3 {doing} channel in, but the first rank of its replica"):
        second.put(None, key=0) if doing == "puts into" else second.take(keys=None, timeout_s=None)


def test_identity_counts_replicas():
    assert [(SECOND.replica, SECOND.num_replicas, SECOND.rank_in_replica), FIRST.rank_in_replica] == [(1, 2, 1), 0]

"""Ports: any cut of items into entries gives the chunks the plan asks for, in order where asked, and waits are
announced."""

from contextlib import contextmanager

import pytest
from hypothesis import given, settings, strategies as st

from rlinf_comm import Channel
from rlinf_workers import WorkersError
from rlinf_workers.execution.ports import Pauses, Reader, Writer
from rlinf_workers.execution.stage_calls import Port


def port(channel, **changes):
    fields = {
        "channel": "c",
        "address": channel.address,
        "granularity": 1,
        "partition": 0,
        "num_partitions": 1,
        "ordered": False,
        "of_own_turn": False,
    }
    return Port(**(fields | changes))


class Journal(Pauses):
    """Records what a port tells its stage."""

    def __init__(self):
        self.events = []

    @contextmanager
    def waiting(self, kind, channel, *, keeps_lease):
        self.events.append(f"wait for {kind} in {channel}")
        yield

    def begin_chunk(self, num_items):
        self.events.append(f"begin {num_items}")

    def add_to_chunk(self, num_items):
        self.events.append(f"add {num_items}")

    def end_chunk(self):
        self.events.append("end")


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(1, 5), max_size=6), granularity=st.integers(0, 7))
def test_chunks_have_the_granularity_whatever_was_put(cuts, granularity):
    channel = Channel.create("c")
    writer = Writer(port(channel, granularity=0), channel, Pauses())
    total = 0
    for cut in cuts:
        writer.put_many([(i, i) for i in range(total, total + cut)])
        total += cut
    channel.close()
    chunks = list(Reader(port(channel, granularity=granularity), channel, Pauses()))
    assert [item for chunk in chunks for item in chunk] == list(range(total))
    size = granularity or max(total, 1)
    assert [len(chunk) for chunk in chunks] == [size] * (total // size) + [total % size] * (total % size > 0)


def test_a_stage_that_computes_takes_what_is_ready_and_does_not_wait_for_more():
    channel, journal = Channel.create("c"), Journal()
    reader = Reader(port(channel, granularity=2), channel, journal)
    writer = Writer(port(channel, granularity=0), channel, Pauses())
    writer.put(1)
    assert reader.ready_chunk() == [], "half a chunk is none"
    writer.put_many([(0, 2), (0, 3)])
    assert reader.ready_chunk() == [1, 2]
    assert reader.ready_chunk() == []
    channel.close()
    assert reader.ready_chunk() == [3], "the last chunk may be short"
    assert reader.ready_chunk() == []
    assert journal.events == ["add 2", "add 1"]


@settings(max_examples=40)
@given(order=st.permutations(range(8)), num_partitions=st.integers(1, 3))
def test_ordered_readers_get_their_keys_in_order(order, num_partitions):
    channel = Channel.create("c")
    writer = Writer(port(channel, granularity=0, num_partitions=num_partitions), channel, Pauses())
    for key in order:
        writer.put(f"item {key}", key=key)
    channel.close()
    for partition in range(num_partitions):
        ordered = port(channel, partition=partition, num_partitions=num_partitions, ordered=True, granularity=2)
        items = [item for chunk in Reader(ordered, channel, Pauses()) for item in chunk]
        assert items == [f"item {key}" for key in range(partition, 8, num_partitions)]


def test_a_gap_in_the_keys_is_an_error_that_names_it():
    channel = Channel.create("c")
    writer = Writer(port(channel, granularity=0), channel, Pauses())
    writer.put_many([(0, "a"), (2, "c")])
    channel.close()
    with pytest.raises(WorkersError, match=r"item 1 never arrived; later ones did: \[2\]"):
        list(Reader(port(channel, ordered=True, granularity=0), channel, Pauses()))


def test_entries_are_cut_to_the_readers_granularity():
    channel = Channel.create("c")
    Writer(port(channel, granularity=2), channel, Pauses()).put_many([(i, i) for i in range(5)])
    assert [len(item.value) for item in channel.take(max_items=8, min_items=3)] == [2, 2, 1]


def test_a_stage_hears_of_every_chunk_and_wait():
    channel = Channel.create("c")
    Writer(port(channel, granularity=0), channel, Pauses()).put_many([(0, "a"), (1, "b")])
    journal = Journal()
    reader = iter(Reader(port(channel, granularity=2), channel, journal))
    assert next(reader) == ["a", "b"]
    channel.close()
    assert next(reader, None) is None
    assert journal.events == ["end", "begin 2", "end", "begin 0"], "a closed channel needs no waiting"


def test_next_chunk_does_not_wait_for_more_than_will_come():
    channel = Channel.create("c")
    Writer(port(channel, granularity=0), channel, Pauses()).put_many([(0, "a")])
    assert Reader(port(channel, granularity=4), channel, Pauses()).next_chunk(at_most=1) == ["a"]


def test_a_full_channel_pauses_the_stage_until_there_is_room():
    channel = Channel.create("c", capacity_items=1)
    journal = Journal()
    writer = Writer(port(channel, granularity=0), channel, journal)
    writer.put("a")

    full = channel

    @contextmanager
    def waiting(kind, channel, *, keeps_lease):
        journal.events.append(f"wait for {kind} in {channel}")
        full.take()
        yield

    journal.waiting = waiting
    writer.put("b")
    assert journal.events == ["wait for room in c"]
    assert channel.take()[0].value == [(0, "b")]

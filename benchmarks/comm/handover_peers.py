"""The receiving processes of the hand-over benchmark: each acknowledges every value with one small message."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any

from rlinf_comm import Channel, ChannelAddress


def receive_from_channel(values: ChannelAddress, acks: ChannelAddress) -> None:
    outgoing = Channel.open(acks)
    for value in Channel.open(values):
        outgoing.put(len(value))
    outgoing.close()


def send_pickled(connection: Connection, value: Any) -> None:
    """Protocol 5 with arrays out of band: the best that a plain pipe can do."""
    buffers: list[pickle.PickleBuffer] = []
    connection.send_bytes(pickle.dumps(value, protocol=5, buffer_callback=buffers.append))
    connection.send(len(buffers))
    for buffer in buffers:
        connection.send_bytes(buffer.raw())


def receive_pickled(connection: Connection) -> Any:
    header = connection.recv_bytes()
    buffers = [connection.recv_bytes() for _ in range(connection.recv())]
    return pickle.loads(header, buffers=buffers)  # noqa: S301 - it is what is measured


def receive_from_pipe(connection: Connection) -> None:
    while (value := receive_pickled(connection)) is not None:
        connection.send(len(value))


def receive_from_torch_queue(values: Any, acks: Any) -> None:
    while (value := values.get()) is not None:
        acks.put(len(value))

"""The shipped weight link keeps its promises, and edges choose theirs by where their ends are."""

import ctypes
import socket
from typing import Any

import pytest

from rlinf_workers.links.choose import choose
from rlinf_workers.links.shared import SharedWeightLink
from rlinf_workers.links.streams import StreamsWeightLink
from rlinf_workers.testing.links import CHECKS, check_a_flipped_byte, check_a_missing_version


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_shared_memory_conforms(check):
    check(SharedWeightLink)


def test_shared_memory_refuses_a_flipped_byte():
    def flip(link):
        ctypes.c_uint8.from_address(link._store.slots_pointer).value ^= 1

    check_a_flipped_byte(SharedWeightLink, flip)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_streams_conform(check):
    check(StreamsWeightLink)


def test_streams_without_deltas_conform():
    check_a_missing_version(StreamsWeightLink, deltas=False)


class FlippingLink(StreamsWeightLink):
    """Its receiver finds a flipped bit in the first version's bytes."""

    @staticmethod
    def open_receiver(port):
        opened = StreamsWeightLink.open_receiver(port)
        data_of, is_flipped = opened._receiver._data_of, []

        def flipped(message, *rest):
            data = data_of(message, *rest)
            if not is_flipped:
                is_flipped.append(True)
                data = data.copy()
                data[3] ^= 8
            return data

        flipping: Any = opened._receiver
        flipping._data_of = flipped
        return opened


def test_streams_refuse_a_flipped_byte():
    check_a_flipped_byte(FlippingLink, lambda link: None)


def test_auto_chooses_by_where_the_ends_are():
    assert choose("auto", {}, [1, 1]) == ("shared", {})
    assert choose("auto", {}, [0, 1]) == ("streams", {"host": socket.gethostname()})
    assert choose("mine:Link", {"pace": 2}, [0, 1]) == ("mine:Link", {"pace": 2})

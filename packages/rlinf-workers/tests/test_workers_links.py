"""The shipped weight link keeps its promises, and edges choose theirs by where their ends are."""

import ctypes

import pytest

from rlinf_workers.errors import FlowDefinitionError
from rlinf_workers.links.choose import choose
from rlinf_workers.links.shared import SharedWeightLink
from rlinf_workers.testing.links import CHECKS, check_a_flipped_byte


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_shared_memory_conforms(check):
    check(SharedWeightLink)


def test_shared_memory_refuses_a_flipped_byte():
    def flip(link):
        ctypes.c_uint8.from_address(link._store.slots_pointer).value ^= 1

    check_a_flipped_byte(SharedWeightLink, flip)


def test_auto_chooses_by_where_the_ends_are():
    assert choose("auto", "actor -> rollout", [1, 1]) == "shared"
    assert choose("mine:Link", "actor -> rollout", [0, 1]) == "mine:Link"
    with pytest.raises(FlowDefinitionError, match=r"actor -> rollout: their ranks are on machines \[0, 1\]"):
        choose("auto", "actor -> rollout", [0, 1])

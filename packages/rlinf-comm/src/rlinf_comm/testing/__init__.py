"""Helpers for tests: bitwise comparison, and checks that any layout, or transport between peers, must pass.

assert_bitwise_equal(served, trained)

@pytest.mark.parametrize("check", LAYOUT_CHECKS, ids=lambda check: check.__name__)
def test_my_layout_conforms(check):
    check(my_layout(tp=2))
"""

from __future__ import annotations

from rlinf_comm.testing.bitwise import assert_bitwise_equal
from rlinf_comm.testing.layouts import LAYOUT_CHECKS, execute_copies
from rlinf_comm.testing.peers_over import PeersOver
from rlinf_comm.testing.transports import TRANSPORT_CHECKS

__all__ = ["assert_bitwise_equal", "LAYOUT_CHECKS", "execute_copies", "TRANSPORT_CHECKS", "PeersOver"]

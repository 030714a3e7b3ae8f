"""Helpers for tests: bitwise comparison, and checks that any channel, layout, or transport between peers must pass.

assert_bitwise_equal(served, trained)

@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
def test_my_channel_conforms(check):
    check(MyChannel.create)

@pytest.mark.parametrize("check", LAYOUT_CHECKS, ids=lambda check: check.__name__)
def test_my_layout_conforms(check):
    check(my_layout(tp=2))
"""

from __future__ import annotations

from rlinf_comm.testing.bitwise import assert_bitwise_equal
from rlinf_comm.testing.channels import CHANNEL_CHECKS, ChannelLike
from rlinf_comm.testing.host_device import HostDevice
from rlinf_comm.testing.layouts import LAYOUT_CHECKS, execute_copies
from rlinf_comm.testing.listeners import Called, disturb, nothing_grows
from rlinf_comm.testing.peers_over import PeersOver
from rlinf_comm.testing.transports import TRANSPORT_CHECKS

__all__ = ["assert_bitwise_equal", "ChannelLike", "CHANNEL_CHECKS", "LAYOUT_CHECKS", "execute_copies"]
__all__ += ["TRANSPORT_CHECKS", "PeersOver", "Called", "disturb", "nothing_grows", "HostDevice"]

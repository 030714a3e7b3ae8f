"""rlinf_comm.peers within one process: every transport does what any transport must."""

import pytest

from rlinf_comm.testing import TRANSPORT_CHECKS, PeersOver


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_transports_conform(check, transport):
    with PeersOver(transport) as peers:
        check(peers)

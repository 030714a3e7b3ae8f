"""rlinf_comm.peers within one process: every transport does what any transport must."""

from types import SimpleNamespace

import pytest

from rlinf_comm import PeerLost
from rlinf_comm.peers.links import PeerLinks
from rlinf_comm.testing import TRANSPORT_CHECKS, PeersOver
from rlinf_comm.wire.deadline import Deadline


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_transports_conform(check, transport):
    with PeersOver(transport) as peers:
        check(peers)


def test_a_loss_that_a_send_has_raised_is_not_raised_again_by_a_sweep():
    opened, sent = [], []

    def lost():
        raise PeerLost("it is gone")

    def make(name, deadline):
        opened.append(SimpleNamespace(outgoing=SimpleNamespace(send=lambda *_: lost(), close=lambda *, farewell: None)))
        return opened[-1]

    links, deadline = PeerLinks("a", make), Deadline(1.0)
    first = links.to("b", deadline)

    def check():  # a sweep looks at the link, while a send finds the same
        with pytest.raises(PeerLost):
            links.send("b", 0, deadline)
        lost()

    first.outgoing.check = check
    links.sweep()
    links.to("b", deadline).outgoing.send = lambda value, _: sent.append(value)
    links.send("b", 1, deadline)
    assert sent == [1] and len(opened) == 2

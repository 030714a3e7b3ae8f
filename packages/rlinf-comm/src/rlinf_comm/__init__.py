"""Moving values and weights between processes, of one machine and of several.

This module, and the top of the packages below, state what other packages may import; all else is private.

rlinf_comm           channels, pools, peers, values as bytes, records, errors
rlinf_comm.wire      connections: handshake, secret, deadlines
rlinf_comm.weights   layouts, reshard plans, and attested weight hand-over (imports torch); with .layouts and .device
rlinf_comm.testing   bitwise comparison, conformance checks
rlinf_comm.protocol  the number of the protocol, for who must not import anything
rlinf_comm.cuda      copies and digests in device memory, for who uses this package alone

Names are imported when they are first used (PEP 562).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""What one synchronization of weights did."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_comm.records import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """One publish() or receive()."""

    policy_version: int
    num_bytes: int
    """Copied by this rank."""
    num_tensors: int
    """Of which this rank copied any part."""
    wait_s: float
    """For the peers."""
    copy_s: float
    """A sender's with the digests, which it computes in the same pass."""
    digest_s: float
    """A receiver's, over what it is about to serve; 0.0 for a sender."""

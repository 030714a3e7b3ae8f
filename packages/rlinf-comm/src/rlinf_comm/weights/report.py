"""What one synchronization of weights did."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_comm.records import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What one publish() or receive() did, on one rank."""

    policy_version: int
    num_bytes: int
    """Bytes that this rank copied."""
    num_tensors: int
    """Tensors of which this rank copied at least a part."""
    wait_s: float
    """Seconds spent waiting for the peers."""
    copy_s: float
    """Seconds spent copying; a sender's include its digests, which it computes in the same pass."""
    digest_s: float
    """Seconds that a receiver spent digesting what it is about to serve; 0.0 for a sender."""

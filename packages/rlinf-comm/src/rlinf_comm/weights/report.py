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
    num_allocations: int = 0
    """Pieces of memory that a sender allocated, since its last report, for receivers to read; of its own tensors, those
    that moved to where receivers see them."""
    num_maps: int = 0
    """Pieces of the senders' memory that a receiver mapped since its last report; 0 where those mapped before are read
    again."""
    num_unmaps: int = 0
    """Those whose mappings it closed since."""

"""The receiver's end of the transports of device memory: a value comes first, over the host transport, as a parcel
with a Place for each of its tensors in device memory; then the tensors, another way.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlinf_comm.peers.transports.base import Incoming
from rlinf_comm.peers.transports.lifted import put_back
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.stream import Traffic

CLOSE_TIMEOUT_S = 1.0
"""Time for a call in another thread to notice the end of its link."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A value whose tensors in device memory come another way. Packable, with what that way needs to know."""

    value: Any


SomeParcel = TypeVar("SomeParcel", bound=Parcel)


class IncomingParcels(Generic[SomeParcel]):
    """Incoming, but for what each transport adds: how the tensors of a parcel come."""

    def __init__(self, host: Incoming, traffic: Traffic, kind: type[SomeParcel]) -> None:
        self.host = host
        self._traffic = traffic
        self._kind = kind
        self._parcel: SomeParcel | None = None
        """One that was taken, and whose tensors have not come yet."""
        self._lock = threading.Lock()
        self._is_open = True

    def _await_tensors(self, parcel: SomeParcel, deadline: Deadline) -> Sequence[Any]:
        """Waits for them. Where this raises, the next receive goes on with the parcel, unless `_parcel` was emptied.

        Raises:
            as Incoming.receive.
        """
        raise NotImplementedError

    def _release(self) -> None:
        """Lets go of what the link holds of the device; called once, after the host transport has been closed."""
        raise NotImplementedError

    def receive(self, deadline: Deadline) -> Any:
        with deadline.holding(self._lock) as held:
            if not held:
                raise self._traffic.timeout("receive from", deadline, "another thread is receiving from it")
            if self._parcel is None:
                value = self.host.receive(deadline)
                if not isinstance(value, self._kind):
                    return value
                self._parcel = value
            parcel = self._parcel
            tensors = self._await_tensors(parcel, deadline)
            self._parcel = None
            self._traffic.count()
            return put_back(parcel.value, tensors)

    def is_spent(self) -> bool:
        return self._parcel is None and self.host.is_spent()

    def close(self, *, farewell: bool) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.host.close(farewell=farewell)
        with Deadline(CLOSE_TIMEOUT_S).holding(self._lock):
            self._release()

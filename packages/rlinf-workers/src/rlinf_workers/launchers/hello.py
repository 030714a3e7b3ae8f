"""The first message between a driver and a worker, each way: who I am and which protocols I speak.

Its form never changes: a JSON object, in which a reader passes over what it does not know. Whatever comes after it may
change with the protocols, because it is read only where both sides have the same.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import rlinf_comm.protocol
import rlinf_workers.protocol


def own_protocols() -> dict[str, int]:
    """Distribution -> the protocol that it speaks in this process."""
    return {"rlinf-comm": rlinf_comm.protocol.PROTOCOL, "rlinf-workers": rlinf_workers.protocol.PROTOCOL}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """One side."""

    interpreter: str = sys.executable
    python: str = platform.python_version()
    protocols: Mapping[str, int] = field(default_factory=own_protocols)

    def encode(self) -> bytes:
        return json.dumps({"rlinf": "hello", **asdict(self)}).encode()

    @classmethod
    def decode(cls, message: bytes) -> Hello:
        """Raises: ValueError for anything that no Hello of any version is."""
        found = json.loads(message)
        if not (isinstance(found, dict) and found.get("rlinf") == "hello"):
            raise ValueError(f"no hello of RLinf: {message[:80]!r}")
        return cls(
            interpreter=str(found.get("interpreter")),
            python=str(found.get("python")),
            protocols=dict(found.get("protocols", {})),
        )


def disagreement(driver: Hello, worker: Hello) -> str | None:
    """What to say where the two do not speak the same protocols: both versions, both interpreters, what to do."""
    differ = [name for name, number in driver.protocols.items() if worker.protocols.get(name) != number]
    if not differ:
        return None
    spoken = ", ".join(
        f"{name}: {worker.protocols.get(name, 'none')} against {driver.protocols[name]}" for name in differ
    )
    return (
        f"{worker.interpreter} (Python {worker.python}) speaks other protocols than the driver's {driver.interpreter} "
        f"(Python {driver.python}), {spoken}; install the same versions of {' and '.join(differ)} in both"
    )

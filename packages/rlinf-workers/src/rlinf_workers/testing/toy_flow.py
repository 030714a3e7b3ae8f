"""A flow small enough to check by hand, for tests of executors, launchers and plans.

    numbers -> scale (x * weight) -> scaled -> shift (+ 1, on the host) -> shifted -> learn (weight += their mean)

`learn` trains the one weight that `scale` serves, so a stale or corrupted sync shows in the numbers; `reference_run`
computes them by plain arithmetic.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_workers.errors import SettingsRefused
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.flow import Flow
from rlinf_workers.worker import Worker

LEARNING_RATE = 0.125


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """The item of the toy flow."""

    index: int
    value: float


class Refusing(Worker):
    """Cannot be made."""

    def __init__(self, why: str) -> None:
        raise SettingsRefused(why)


class Scale(Worker):
    """Multiplies by the weight it serves."""

    def __init__(self) -> None:
        self._weight = torch.zeros(1)
        self._on_device = True

    def scale(self, numbers: Reader[Number], scaled: Writer[Number]) -> None:
        for chunk in numbers:
            assert self._on_device, "computes while its state is offloaded"
            for item in chunk:
                product = Number(index=item.index, value=item.value * float(self._weight))
                scaled.put(product, key=item.index)

    def weights(self) -> Mapping[str, Tensor]:
        return {"weight": self._weight}

    def onload(self) -> None:
        self._on_device = True

    def offload(self) -> None:
        self._on_device = False


class Shift(Worker):
    """Adds one; needs no device."""

    def shift(self, scaled: Reader[Number], shifted: Writer[Number]) -> None:
        for chunk in scaled:
            shifted.put_many([(item.index, Number(index=item.index, value=item.value + 1.0)) for item in chunk])


class Learn(Worker):
    """Moves the weight by the mean of the items of a run."""

    def __init__(self) -> None:
        self._weight = torch.ones(1)
        self._version = 0

    def learn(self, shifted: Reader[Number]) -> None:
        """The ranks of a replica share its items, the replicas share the run's."""
        total = torch.zeros(2, dtype=torch.float64)
        for chunk in shifted:
            part = torch.zeros(2, dtype=torch.float64)
            for item in chunk[self.replica_ranks.rank :: self.replica_ranks.num_ranks]:
                part += torch.tensor([item.value, 1.0], dtype=torch.float64)
            total += self.replica_ranks.sum_(part)
        total = self.replicas.sum_(total)
        self._weight += LEARNING_RATE * float(total[0] / total[1])
        self._version += 1
        if self.rank == 0:
            self.record("learn/weight", float(self._weight))

    def weights(self) -> Mapping[str, Tensor]:
        return {"weight": self._weight}

    @property
    def policy_version(self) -> int:
        return self._version


class Fault(Worker):
    """Fails in the ways that processes fail, one method per way."""

    def __init__(self, service: str = "") -> None:
        """Sends a request to a `service` of the driver before the worker can be called."""
        self._num_calls = 0
        self._reply = self.ask(service, 0) if service else None

    def count(self) -> int:
        """Calls before this one."""
        self._num_calls += 1
        return self._num_calls - 1

    def ask(self, service: str, value: int) -> str:
        """The reply of a service of the driver."""
        with self._host.waits.waiting("service", service):
            return self._host.request(service, value).result()

    def first_reply(self) -> str | None:
        """The reply to the constructor's request."""
        return self._reply

    def raise_error(self) -> None:
        raise ValueError("broken on purpose")

    def die(self) -> None:
        print("about to die", flush=True)
        os._exit(7)

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def sleep_holding_the_interpreter(self, seconds: int) -> None:
        """Like native code that does not release the GIL: no other thread of the process runs meanwhile."""
        ctypes.PyDLL(None).sleep(seconds)

    def process_id(self) -> int:
        return os.getpid()

    def sum_of_ranks(self) -> float:
        return float(self.ranks.sum_(torch.tensor(float(self.rank + 1))))


def toy_flow(*, max_staleness: int = 0) -> Flow:
    """The flow of the module's docstring."""
    flow = Flow("toy", max_staleness=max_staleness)
    flow.worker("scale", Scale)
    flow.worker("shift", Shift)
    flow.worker("learn", Learn)
    flow.stage("scale", Scale.scale, reads="numbers", writes="scaled")
    flow.stage("shift", Shift.shift, reads="scaled", writes="shifted", needs_device=False)
    flow.stage("learn", Learn.learn, reads="shifted", dispatch="key", trains=True)
    flow.weights("learn", to="scale")
    return flow


def reference_run(numbers: Sequence[float], num_steps: int, *, max_staleness: int = 0) -> list[float]:
    """The weight after each step, by plain arithmetic; `scale` is always as many steps behind as it may be."""
    weights = [1.0]
    for step in range(num_steps):
        served = weights[max(0, step - max_staleness)]
        moved = LEARNING_RATE * sum(number * served + 1.0 for number in numbers) / len(numbers)
        weights.append(weights[-1] + moved)
    return weights[1:]

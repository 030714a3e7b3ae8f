"""The workers of a flow in this process, one for each worker group: no executor, channels, leases or plan.

An ordinary loop calls their methods, as in `rlinf.program` and the benchmarks. Records pass by reference, and weights
are copied tensor by tensor.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch

from rlinf_comm.weights.layouts import has_adapter
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.flow import Flow
from rlinf_workers.launchers.base import Identity
from rlinf_workers.metrics import merge
from rlinf_workers.weight_sync.base import WeightTarget
from rlinf_workers.worker import StepContext


class InProcessWorkers:
    """Creates the workers that a flow declares, each as the only rank of its group, with its state on the device.

    Args:
        device: `cpu:0` or `cuda:0`; the device of the groups with a stage that needs one.
    """

    def __init__(self, flow: Flow, device: str = "cpu:0") -> None:
        self._workers: dict[str, Any] = {}
        self._hosts: list[WorkerHost] = []
        on_device = {stage.stage.worker for stage in flow.stages.values() if stage.stage.needs_device}
        for name, definition in flow.workers.items():
            identity = Identity(role=name, rank=0, num_ranks=1, devices=(device,) if name in on_device else ())
            host = WorkerHost(identity, self._request)
            self._workers[name] = host.make(definition.worker_class, *definition.arguments)
            self._workers[name].onload()
            self._hosts.append(host)

    def __contains__(self, group: str) -> bool:
        return group in self._workers

    def __getitem__(self, group: str) -> Any:
        """The worker of a group."""
        return self._workers[group]

    def begin(self, context: StepContext) -> None:
        """Sets the step of the workers' next calls."""
        for host in self._hosts:
            host.step = context

    def metrics(self) -> dict[str, float]:
        """The metrics that workers have recorded since the last call, like `FlowRun.metrics`."""
        for host in self._hosts:
            host.shown_rows.clear()
        return merge(host.metrics.drain() for host in self._hosts)

    @torch.no_grad()
    def sync(self, source: str, target: str) -> None:
        """Copies the weights of the training group `source` to the serving group `target`."""
        filled: WeightTarget = self[target].weight_target(source)
        served = filled.weights()
        trained = self[source].unmerged_weights() if has_adapter(served) else self[source].weights()
        for name, tensor in served.items():
            tensor.copy_(trained[name])
        filled.weights_received(self[source].policy_version)

    def close(self) -> None:
        """Closes the workers' resources, such as simulators and pools of processes."""
        for worker in self._workers.values():
            worker.close()

    def _request(self, service: str, value: Any, *, wants_reply: bool = True) -> Future[Any]:
        """Replies with the address of a group that others share (`Flow.worker`); there is no other service."""
        reply: Future[Any] = Future()
        reply.set_result(self._workers[service].address())
        return reply

"""How busy a GPU was, read from a library that stands in for NVML."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rlinf_workers import gpu_activity
from rlinf_workers.execution.running_stage import RunningStage
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.gpu_activity import GpuActivity
from rlinf_workers.launchers.base import Identity
from rlinf_workers.worker import Worker


class Driver:
    """A driver's library with one GPU; its counters add up what a second had."""

    def __init__(self, *, supported=True, refuses=False):
        self.supported, self.refuses = supported, refuses
        self.totals, self.kept, self.num_taken = {2: 0.0, 5: 0.0}, {}, 0

    def works(self, seconds, sm, tensor):
        self.totals = {2: self.totals[2] + seconds * sm, 5: self.totals[5] + seconds * tensor}
        self.clock.now += seconds

    def library(self):
        return SimpleNamespace(
            nvmlInit_v2=lambda: 0,
            nvmlDeviceGetHandleByUUID=lambda uuid, handle: 0,
            nvmlGpmQueryDeviceSupport=self.query_support,
            nvmlGpmSampleAlloc=self.alloc,
            nvmlGpmSampleGet=self.get,
            nvmlGpmSampleFree=self.free,
            nvmlGpmMetricsGet=self.metrics,
        )

    def query_support(self, handle, support):
        support._obj.is_supported = self.supported
        return 0

    def alloc(self, handle):
        self.num_taken += 1
        handle._obj.value = self.num_taken
        self.kept[self.num_taken] = None
        return 0

    def get(self, device, handle):
        self.kept[handle.value] = (self.clock.now, self.totals)
        return 4 if self.refuses else 0

    def free(self, handle):
        del self.kept[handle.value]
        return 0

    def metrics(self, request):
        (since, before), (now, after) = self.kept[request._obj.first], self.kept[request._obj.last]
        for metric in request._obj.metrics[: request._obj.count]:
            metric.status = 0 if metric.id in after else 3
            if metric.id in after:
                metric.value = 100 * (after[metric.id] - before[metric.id]) / (now - since)
        return 0

    clock = SimpleNamespace(now=0.0)


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(gpu_activity.time, "monotonic", lambda: Driver.clock.now)
    return Driver()


def test_a_stage_records_the_counters_while_it_holds_its_gpu_weighted_by_time(driver, monkeypatch):
    host = WorkerHost(Identity(role="actor", rank=0, num_ranks=1), lambda *_, **__: Future())
    host.make(Worker)
    activity = GpuActivity("GPU-1", driver.library())
    monkeypatch.setattr(WorkerHost, "gpu_activity", activity)
    call = SimpleNamespace(stage="actor", lease_turn=None, ahead=False, receives={}, offloads=False)
    stage = RunningStage(host, call)
    for seconds, sm, tensor in ((2.0, 0.5, 0.25), (6.0, 0.9, 0.65), (0.05, 0.0, 0.0)):
        stage.enter()
        driver.works(seconds, sm, tensor)
        stage.leave()
        driver.works(5.0, 1.0, 1.0)  # another process's
    stage.enter()
    stage.abort()
    recorded = stage.metrics.drain()
    shares = {name: sum(metric.terms) / sum(metric.weights) for name, metric in recorded.items()}
    assert shares == pytest.approx({"perf/sm_active/actor": 0.8, "perf/tensor_active/actor": 0.55})
    assert not driver.kept, "all samples are freed"


def test_without_counters_nothing_is_recorded(driver):
    driver.supported = False
    with pytest.raises(OSError, match="no performance monitoring"):
        GpuActivity("GPU-1", driver.library())
    driver.supported, driver.refuses = True, True
    assert GpuActivity("GPU-1", driver.library()).begin() is None
    assert not driver.kept

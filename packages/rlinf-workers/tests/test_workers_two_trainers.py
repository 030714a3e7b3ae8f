"""One worker group serves the policies of two trainers, each with weights and versions of its own.

numbers -> serve (x * first weight, x * second weight) -> firsts -> first, and seconds -> second
"""

from concurrent.futures import Future

import pytest
import torch

from rlinf_comm.weights import Layout, reshard_plan, specs_of
from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, FlowDefinitionError, Reader, StepContext, Worker, Writer
from rlinf_workers.execution.in_process import InProcessWorkers
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.testing.toy_flow import LEARNING_RATE, Learn, Number, Scale
from rlinf_workers.weight_sync.base import WeightPort

pytestmark = pytest.mark.usefixtures("forked_workers")

VALUES = [float(i) for i in range(6)]
NUMBERS = [Number(index=i, value=value) for i, value in enumerate(VALUES)]
NUM_STEPS = 4
CLUSTER = Cluster.cpu_slots(2)
BIAS = 3.0
"""Of the second policy; does not train."""
FIRST_VERSION = 5
"""Of the second policy."""


class Policy:
    """One of the policies of `Serve`."""

    checks_first = False

    def __init__(self, group: Worker, *names: str) -> None:
        self._group, self._weights, self.version = group, {name: torch.zeros(1) for name in names}, -1

    def weights(self) -> dict[str, torch.Tensor]:
        return self._weights

    def layout(self) -> Layout:
        return Layout.replicated(specs_of(self.weights()), self._group.num_ranks)

    def open_receiver(self, ports):
        return WEIGHT_SYNCS.get(ports[0].weight_sync).open_receiver(ports[0])

    def weights_received(self, policy_version: int) -> None:
        self.version = policy_version

    def times(self, item: Number) -> Number:
        return Number(index=item.index, value=item.value * self._float("weight") + self._float("bias"))

    def _float(self, name: str) -> float:
        return float(self._weights.get(name, 0.0))


class Serve(Worker):
    """Multiplies by the weights of two trainers."""

    def __init__(self) -> None:
        self._policies = {"first": Policy(self, "weight"), "second": Policy(self, "weight", "bias")}

    def weight_target(self, source: str) -> Policy:
        return self._policies[source]

    def serve(self, numbers: Reader[Number], firsts: Writer[Number], seconds: Writer[Number]) -> None:
        for chunk in numbers:
            for name, policy in self._policies.items():
                self.record(f"version/{name}", policy.version)
            for item in chunk:
                firsts.put(self._policies["first"].times(item), key=item.index)
                seconds.put(self._policies["second"].times(item), key=item.index)


class First(Learn):
    """Trains the first policy."""

    def learn(self, shifted: Reader[Number]) -> None:
        super().learn(shifted)
        self.record("first/weight", float(self._weight))


class Second(Learn):
    """Trains a policy with another tensor beside the first one's, which has been trained before."""

    def __init__(self) -> None:
        self._weight, self._bias, self._version = torch.tensor([2.0]), torch.tensor([BIAS]), FIRST_VERSION

    def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": self._weight, "bias": self._bias}

    def learn(self, shifted: Reader[Number]) -> None:
        super().learn(shifted)
        self.record("second/weight", float(self._weight))


def flow_of_two(max_staleness: int = 0) -> Flow:
    flow = Flow("two", max_staleness=max_staleness).worker("serve", Serve)
    flow.worker("first", First).worker("second", Second)
    flow.stage("serve", Serve.serve, reads="numbers", writes=("firsts", "seconds"))
    flow.stage("first", First.learn, reads="firsts", dispatch="key", trains=True)
    flow.stage("second", Second.learn, reads="seconds", dispatch="key", trains=True)
    return flow.weights("first", to="serve").weights("second", to="serve")


def expected(weight: float, bias: float, max_staleness: int) -> list[float]:
    """A policy's weight after each step, by plain arithmetic."""
    weights = [weight]
    for step in range(NUM_STEPS):
        served = weights[max(0, step - max_staleness)]
        weights.append(weights[-1] + LEARNING_RATE * sum(value * served + bias for value in VALUES) / len(VALUES))
    return weights[1:]


@pytest.mark.parametrize(
    ("mode", "max_staleness", "choices"),
    [
        pytest.param("collocated", 0, {}, marks=pytest.mark.slow),
        ("collocated", 0, {"num_ranks": {"serve": 2}, "weight_sync": "streams"}),
        pytest.param("collocated", 1, {}, marks=pytest.mark.slow),
        ("disaggregated", 1, {"granularity": {"serve": 2}}),
    ],
)
def test_each_policy_is_served_as_its_own_trainer_published_it(tmp_path, mode, max_staleness, choices):
    flow, cluster = flow_of_two(max_staleness), CLUSTER if mode == "collocated" else Cluster.cpu_slots(3)
    weight_sync = choices.pop("weight_sync", "auto")
    plan = plan_for_mode(flow.graph(), cluster, mode, **choices)
    with Executor(
        cluster=cluster, log_folder=tmp_path, env_vars={"OMP_NUM_THREADS": "1"}, weight_sync=weight_sync
    ) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        runs = []
        for step in range(NUM_STEPS):
            context = StepContext(step=step, phase="train", seed=0, num_items=len(NUMBERS))
            executor.begin(flow, context=context, feeds={"numbers": NUMBERS})
            if step >= max_staleness:
                runs.append(executor.finish(60.0))
        runs += [executor.finish(60.0) for _ in range(executor.num_under_way)]
    assert [run.metrics["first/weight"] for run in runs] == pytest.approx(expected(1.0, 0.0, max_staleness))
    assert [run.metrics["second/weight"] for run in runs] == pytest.approx(expected(2.0, BIAS, max_staleness))
    due = [max(0, step - max_staleness) for step in range(NUM_STEPS)]
    assert [run.metrics["version/first"] for run in runs] == due
    assert [run.metrics["version/second"] for run in runs] == [FIRST_VERSION + version for version in due]


def test_without_an_executor_each_policy_gets_its_own_trainers_weights():
    workers = InProcessWorkers(flow_of_two())
    workers.sync("first", "serve")
    workers.sync("second", "serve")
    served = [workers["serve"].weight_target(name).weights() for name in ("first", "second")]
    assert served == [{"weight": 1.0}, {"weight": 2.0, "bias": BIAS}]
    assert [workers["serve"].weight_target(name).version for name in ("first", "second")] == [0, FIRST_VERSION]


class AnySync:
    @staticmethod
    def open_receiver(port):
        return object()


def test_a_worker_with_one_set_of_weights_refuses_a_second_trainer():
    host = WorkerHost(Identity(role="scale", rank=0, num_ranks=1), lambda *_, **__: Future())
    host.make(Scale)
    alike = Layout.replicated(specs_of({"weight": torch.zeros(1)}), 1)

    def port(edge: str) -> WeightPort:
        sync, reshard = f"{__name__}:AnySync", reshard_plan(alike, alike)
        return WeightPort(edge=edge, side="receive", rank=0, reshard=reshard, weight_sync=sync, address=None)

    host.open_weights([port("first -> scale")])
    host.open_weights([port("first -> scale")])  # anew
    with pytest.raises(FlowDefinitionError, match="first -> scale and second -> scale fill the same weights; Scale"):
        host.open_weights([port("second -> scale")])


def test_one_edge_of_a_group_offers_weights():
    flow = flow_of_two(1).weights("first", to="serve", offers=True)
    with pytest.raises(FlowDefinitionError, match="'serve' is offered weights of 'first' and 'second'"):
        flow.weights("second", to="serve", offers=True)

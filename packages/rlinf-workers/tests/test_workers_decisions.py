"""What stages record of a run, and follow when it is done again."""

import pytest

from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, Reader, StepContext
from rlinf_workers.testing.toy_flow import Learn, Number

pytestmark = pytest.mark.usefixtures("forked_workers")
CLUSTER = Cluster.cpu_slots(1)


class Choosing(Learn):
    """Learns from its own choice of a factor, which it records; a recorded one is followed."""

    def learn(self, numbers: Reader[Number]) -> None:
        taken = [item for chunk in numbers for item in chunk]
        recorded = {rank: one["factor"] for rank, one in self.recorded or [] if "factor" in one}
        factor = recorded.get(self.rank, taken[0].value)
        self.decide({"factor": factor})
        self._weight *= factor
        self._version += 1


def run(value: float, **recording):
    """One run in new processes, which choose this value."""
    flow = Flow("choosing").worker("learn", Choosing)
    flow.stage("learn", "learn", reads="numbers", dispatch="key", trains=True)
    with Executor(cluster=CLUSTER) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))
        context = StepContext(step=0, phase="train", seed=0, num_items=1)
        executor.begin(flow, context=context, feeds={"numbers": [Number(index=0, value=value)]}, **recording)
        return executor.finish().decisions


def test_a_run_that_follows_the_decisions_of_another_ends_with_its_weights():
    """The digest of the weights is recorded where a stage trains, whether or not they are synced to another group."""
    decisions, others = run(2.0, records=True), run(3.0, records=True)
    (_, choice), (_, weights) = decisions["learn"]
    assert choice == {"factor": 2.0} and weights.keys() == {"weights"}
    assert others["learn"] != decisions["learn"] and others["learn"][1] != decisions["learn"][1]
    assert run(3.0, records=True, recorded=decisions) == decisions
    assert run(2.0) == {}

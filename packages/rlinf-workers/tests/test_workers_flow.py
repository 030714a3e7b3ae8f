"""Flow: what is declared is what the graph says, and mistakes are named."""

from concurrent.futures import Future

import pytest

from rlinf_workers import Flow, FlowDefinitionError, Worker
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.testing.toy_flow import Learn, Scale, toy_flow


def test_the_graph_says_what_was_declared():
    graph = toy_flow().graph()
    assert graph.feeds == ("numbers",)
    assert graph.collects == ()
    assert [stage.name for stage in graph.stages] == ["scale", "shift", "learn"]
    assert graph.turns() == (("scale",), ("shift",), ("learn",))
    assert graph.training_groups == ("learn",)
    assert graph.stage("shift").needs_device is False


def test_a_channel_nobody_reads_is_collected():
    flow = Flow("f").worker("scale", Scale)
    flow.stage("scale", Scale.scale, reads="numbers", writes="scaled")
    assert flow.graph().collects == ("scaled",)


def test_workers_of_another_flow():
    flow = Flow("g").workers_of(toy_flow(), "scale")
    assert flow.workers["scale"].worker_class is Scale


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda f: f.worker("scale", Scale), "'scale' is declared twice"),
        (lambda f: f.worker("x", dict), "give a subclass of Worker"),
        (lambda f: f.stage("y", Scale.scale, reads="a", writes="b"), "not declared; there are \\['scale'\\]"),
        (lambda f: f.stage("scale", Learn.learn, reads="a"), "is not a method of Scale"),
        (
            lambda f: f.stage("scale", Scale.scale, reads="a"),
            "takes 2 ports, but the stage reads and writes 1 channels",
        ),
    ],
)
def test_mistakes_are_named(declare, message):
    flow = Flow("f").worker("scale", Scale)
    with pytest.raises(FlowDefinitionError, match=message):
        declare(flow)


def test_two_stages_of_one_name():
    flow = Flow("f").worker("scale", Scale)
    flow.stage("scale", Scale.scale, reads="a", writes="b")
    with pytest.raises(FlowDefinitionError, match="stage 'scale' is declared twice"):
        flow.stage("scale", Scale.scale, reads="c", writes="d")


def test_worker_attributes_are_there_before_init():
    class Curious(Worker):
        def __init__(self):
            self.seen = (self.name, self.num_ranks, self.identity.devices)

    identity = Identity(role="w", rank=1, num_ranks=2, devices=("cpu:1",), rendezvous="")
    worker = WorkerHost(identity, lambda service, value, wants_reply=True: Future()).make(Curious)
    assert worker.seen == ("w/1", 2, ("cpu:1",))

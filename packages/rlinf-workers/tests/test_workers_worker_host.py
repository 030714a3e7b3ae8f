"""What a host does with its worker's state: when it goes, what is told of it meanwhile, what is received anew."""

from concurrent.futures import Future

import torch

from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.worker import Worker


class Noting(Worker):
    def __init__(self):
        self.calls = []

    def offload(self):
        self.calls.append("offload")

    def discard(self):
        self.calls.append("discard")

    def weights(self):
        return {}

    def load_model(self):
        self.calls.append("load_model")

    def save_model(self):
        self.calls.append("save_model")


def host() -> tuple[WorkerHost, Noting]:
    worker_host = WorkerHost(Identity(role="noting", rank=0, num_ranks=1), lambda *_, **__: Future())
    return worker_host, worker_host.make(Noting)


def test_the_state_of_a_worker_that_is_away_is_what_it_was(monkeypatch):
    held = {"bytes": 500}
    tried, _ = host()
    monkeypatch.setattr(tried, "_device_bytes", lambda: held["bytes"])
    assert tried.memory_bytes()[0] == 500
    tried.unload()
    held["bytes"] = 3
    assert tried.memory_bytes()[0] == 500
    tried.unload()  # there is nothing left to measure
    assert tried.memory_bytes()[0] == 500
    tried.is_loaded = True
    assert tried.memory_bytes()[0] == 3


def test_discarded_weights_are_received_again_whatever_version_comes():
    tried, worker = host()
    tried.served_versions["actor -> noting"] = 7
    tried.unload()
    assert tried.served_versions == {"actor -> noting": 7}
    tried.may_discard = True
    tried.unload()
    assert tried.served_versions == {}
    assert worker.calls == ["offload", "discard"]


class LendingSender:
    """A sender whose receivers have the tensors' memory mapped."""

    def __init__(self, calls):
        self._calls = calls

    def publish(self, tensors, policy_version):
        return None

    def withdraw(self):
        self._calls.append("withdraw")


def test_memory_that_receivers_have_mapped_is_withdrawn_before_the_state_leaves():
    tried, worker = host()
    tried._senders["noting -> served"] = LendingSender(worker.calls)
    tried.unload()
    assert worker.calls == ["withdraw", "offload"]
    tried.unload()  # it is gone already
    assert worker.calls == ["withdraw", "offload", "offload"]


class ReferencingSender:
    """A sender whose tensors are read where they lie."""

    def __init__(self, calls):
        self._calls = calls

    def publish(self, tensors, policy_version):
        self._calls.append("publish")
        return lambda: self._calls.append("settle")


class Taker:
    def __init__(self, calls):
        self._calls = calls

    def receive(self, tensors, policy_version, timeout_s=60.0):
        self._calls.append("receive")


def test_whoever_reads_the_weights_is_done_before_they_change():
    tried, worker = host()
    tried._senders["noting -> other"] = ReferencingSender(worker.calls)
    tried._receivers["another -> noting"] = Taker(worker.calls)
    tried.call("load_model")
    assert worker.calls == ["load_model"]
    tried.call("publish_weights", "noting -> other")
    tried.call("save_model")
    tried.call("unload")
    tried.call("load_model")
    tried.receive_weights("another -> noting", 3)
    assert worker.calls[1:] == ["publish", "save_model", "offload", "settle", "load_model", "settle", "receive"]


def test_a_replica_of_one_rank_meets_nobody(tmp_path):
    """The other ranks may wait for items that come only when this one has gone on."""
    identity = Identity(role="worker", rank=0, num_ranks=2, rendezvous=str(tmp_path / "missing" / "rendezvous"))
    alone = WorkerHost(identity, lambda *_, **__: Future()).replica_ranks
    assert float(alone.sum_(torch.tensor(3.0))) == 3.0

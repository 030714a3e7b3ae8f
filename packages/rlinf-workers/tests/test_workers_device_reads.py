"""On a GPU an update reads the device a constant number of times, however many micro-batches and layers it has: each
read waits for everything launched before. Here the operations that would read a GPU are counted on a CPU, with the
switches of a GPU set."""

from collections import Counter

import pytest
import torch
from test_workers_token_budget import scored_groups, settings_of
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_algos import DeferredChecks, NonFiniteError, ppo_clip_loss
from rlinf_workers.models.placement import to_device
from rlinf_workers.roles.language.actor import Actor
from rlinf_workers.trainers.base import BackendSettings
from rlinf_workers.trainers.fsdp2 import backend as fsdp2_backend
from rlinf_workers.trainers.replicated import backend as replicated_backend

READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "bincount", "_unique2", "unique_dim")
"""Names of operators whose result, or its shape, the host has to know."""


class Reads(TorchDispatchMode):
    """Counts operators that read the device."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        indices = args[1] if name in ("index", "index_put_", "index_put", "_index_put_impl_") else ()
        if name in READS or any(one is not None and one.dtype == torch.bool for one in indices):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_gpu(monkeypatch):
    for module in (replicated_backend, fsdp2_backend):
        monkeypatch.setattr(module, "defers_checks", lambda device: True)
    monkeypatch.setattr(fsdp2_backend.FSDP2Backend, "_is_fused", True)


def update_reads(make_worker, settings, limit, backend):
    """Micro-batches of the first update, what `learn` reads of the device in all of them, and what the end reads."""
    settings = settings_of(*settings, max_tokens_per_micro_batch=limit, backend=backend)
    actor = make_worker(Actor, settings, num_items=9)
    actor.begin_step()
    groups = actor.learning_groups(scored_groups())
    micro_batches = list(actor.micro_batches(next(iter(actor.minibatches(groups)))))
    actor.begin_update()
    with Reads() as learning:
        for batch in micro_batches:
            actor.learn(batch)
    with Reads() as ending:
        actor.end_update()
    return len(micro_batches), learning.counts, ending.counts


@pytest.mark.parametrize("backend", ["replicated", "fsdp2"])
@pytest.mark.parametrize("name", ["with a KL", "ppo"])
def test_an_update_reads_the_device_a_constant_number_of_times(make_worker, model, as_on_gpu, name, backend):
    settings = BackendSettings(name=backend, num_shards=2)
    num_many, learned, many = update_reads(make_worker, (model, name), 24, settings)
    num_few, _, few = update_reads(make_worker, (model, name), 100_000, settings)
    assert num_many > num_few and not learned
    assert many == few, "nothing is read for a micro-batch"
    assert many.total() <= 16


class FakeTensor:
    """Of a host's memory; notes what it is asked for."""

    device = torch.device("cpu")

    def __init__(self):
        self.calls = []

    def pin_memory(self):
        self.calls.append("pin_memory")
        return self

    def to(self, device, non_blocking=False):
        self.calls.append((device.type, non_blocking))
        return self


def test_tensors_go_to_a_gpu_from_pinned_memory_without_waiting():
    on_gpu, on_cpu = FakeTensor(), FakeTensor()
    to_device(on_gpu, torch.device("cuda"))
    to_device(on_cpu, torch.device("cpu"))
    assert on_gpu.calls == ["pin_memory", ("cuda", True)] and on_cpu.calls == [("cpu", False)]


def test_without_a_gpu_checks_are_read_at_once(make_worker, model):
    _, learned, _ = update_reads(make_worker, (model, "grpo"), 24, BackendSettings(num_shards=2))
    assert learned.total() > 10


def test_a_number_that_is_not_finite_ends_the_update(make_worker, model, as_on_gpu):
    settings = settings_of(model, "grpo")
    actor = make_worker(Actor, settings, num_items=9)
    actor.begin_step()
    groups = actor.learning_groups(scored_groups())
    groups[1].advantages[2] = torch.nan
    actor.begin_update()
    for batch in actor.micro_batches(groups):
        actor.learn(batch)
    with pytest.raises(NonFiniteError, match="advantages is not finite"):
        actor.end_update()


def test_deferred_checks_give_the_loss_and_the_gradient_of_immediate_ones():
    def loss():
        policy = torch.tensor([[-0.5, -1.0], [-2.0, -0.1]], requires_grad=True)
        terms = ppo_clip_loss(policy, policy.detach() - 0.1, torch.tensor([1.0, -1.0]), torch.ones(2, 2)).loss_terms
        terms.sum().backward()
        return terms.detach(), policy.grad

    checks = DeferredChecks()
    with checks.collecting():
        deferred = loss()
    checks.raise_if_failed()
    for one, other in zip(deferred, loss(), strict=True):
        assert torch.equal(one, other)

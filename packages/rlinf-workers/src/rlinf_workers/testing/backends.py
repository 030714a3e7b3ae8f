"""The conformance suite of training backends, for custom and shipped ones.

    from rlinf_workers.testing.backends import check_backend
    check_backend(MyBackend, folder=str(tmp_path))

The model is a small network in float64; expected values are computed by autograd and torch's AdamW on the whole batch.
A backend that only supports language models is checked with one of those instead
(`rlinf_workers.testing.language_backends`). Every function raises AssertionError with the expected and the actual
value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_algos import path_of
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.plugins import TRAINERS
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.testing.weight_sync import parts_of
from rlinf_workers.trainers.base import (
    NOT_ASKED,
    LossOf,
    ModelAdapter,
    ModelOutputs,
    OptimizerSettings,
    TrainingBackend,
)
from rlinf_workers.trainers.checkpoint import MODEL, OPTIMIZER, CheckpointFiles
from rlinf_workers.worker import Worker

NUM_ROWS, NUM_INPUTS, NUM_CHOICES, NUM_SHARDS = 24, 5, 3, 2
BATCH = torch.randn(NUM_ROWS, NUM_INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
"""[rows, inputs]; row r chooses r % NUM_CHOICES, encoded in its last column."""
BATCH[:, -1] = torch.arange(NUM_ROWS) % NUM_CHOICES
READABLE = OptimizerSettings(learning_rate=1.0, epsilon=1.0, max_grad_norm=1e9)
"""Step sizes follow the size of the gradient."""
ORDINARY = OptimizerSettings(
    learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.05, lr_warmup_steps=3, lr_decay_steps=10, min_lr_ratio=0.5
)

MakeBackend = Callable[..., TrainingBackend]
"""The class, or a function with its constructor's arguments."""


class Chooser(ModelAdapter):
    """A network with log-probabilities of choices, and values."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def build(self, device: torch.device) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            model = nn.Sequential(nn.Linear(NUM_INPUTS, 7), nn.Tanh(), nn.Linear(7, NUM_CHOICES + 1))
        model.register_buffer("count", torch.zeros(1))
        return model.double().to(device)

    def answers(self, model: Any, batch: Tensor, *, entropies: bool) -> ModelOutputs:
        outputs = model(batch)
        logprobs = outputs[:, :NUM_CHOICES].log_softmax(-1)
        return ModelOutputs(
            logprobs=logprobs.gather(1, batch[:, -1:].long())[:, 0],
            entropies=-(logprobs.exp() * logprobs).sum(-1) if entropies else NOT_ASKED,
            values=outputs[:, NUM_CHOICES],
        )


class Subject:
    """The model to test with, and a batch of NUM_ROWS rows that is split into micro-batches."""

    bound = 1e-12
    """Largest difference of outputs and weights from autograd's and AdamW's, relative to the largest value."""
    readable = READABLE
    ordinary = ORDINARY

    def kind(self, seed: int = 0) -> ModelAdapter:
        return Chooser(seed)

    def rows(self, which: slice) -> Any:
        """A micro-batch of these rows."""
        return BATCH[which]

    def sums(self, batch: Any) -> tuple[float, float]:
        """Statistics of a micro-batch: its rows, and another sum."""
        return float(len(batch)), float(batch[:, 0].sum())

    def loss(self, batch: Any, answers: ModelOutputs) -> Tensor:
        """A summed loss of all outputs."""
        return ((answers.values - batch[:, 0]).square() - answers.logprobs - 0.1 * answers.entropies).sum()

    def touch(self, model: Any) -> None:
        """Changes a buffer, if the model has one."""
        model.count.add_(1)

    def loss_of(self, batch: Any, scale: float = 1.0) -> LossOf:
        return lambda answers: (scale * self.loss(batch, answers), self.sums(batch))

    @property
    def batch(self) -> Any:
        return self.rows(slice(None))


CHOICES = Subject()


def check_backend(make: MakeBackend, folder: str, worker: Worker | None = None, *, subject: Subject = CHOICES) -> None:
    """Checks the whole contract of `TrainingBackend`. In a group of several ranks each calls it with its own worker.

    Args:
        folder: an empty folder for files, the same on all ranks.
    """
    worker = worker or trial_worker()
    _check_answers(make, worker, subject)
    _check_layout(make, worker, subject)
    # clip_grad_norm_ adds 1e-6 to the norm; others need not
    for settings, num_shards, size, slack in (
        (subject.readable, 2, 3, 1e-12),
        (subject.readable, 2, 12, 1e-12),
        (subject.readable, 4, 2, 1e-12),
        (subject.ordinary, 2, 4, 1e-6),
    ):
        _check_updates(make, worker, subject, settings, num_shards, size, max(slack, subject.bound))
    for check in (_check_not_finite, _check_offload, _check_restart):
        one, other = (make(subject.kind(), worker, optimizer=subject.ordinary, num_shards=NUM_SHARDS) for _ in range(2))
        check(one, other, subject)
        _check_same(one, other)
    _check_files(make, worker, subject, folder)


def check_ranks(
    make: MakeBackend,
    folder: str,
    *,
    num_ranks: int,
    num_ranks_per_replica: int,
    subject: Callable[[], Subject] = Subject,
) -> None:
    """Runs `check_backend` in a group of processes on this machine, which must be able to import `make` and the
    subject's class."""
    with launched(LocalLauncher) as launcher:
        per_replica = num_ranks_per_replica
        ranks = start(launcher, Path(folder), Tested, num_ranks=num_ranks, num_ranks_per_replica=per_replica)
        ranks.call("check", path_of(make), folder, path_of(subject))


class Tested(Worker):
    """The worker of one of several ranks."""

    def check(self, backend: str, folder: str, subject: str) -> None:
        check_backend(TRAINERS.get(backend), folder, self, subject=TRAINERS.get(subject)())


def trial_worker() -> Worker:
    """A worker in this process, alone in its group."""
    return WorkerHost(Identity(role="tested", rank=0, num_ranks=1), lambda *_, **__: Future()).make(Worker)


def update(backend: TrainingBackend, subject: Subject = CHOICES, **how: Any) -> None:
    """One update on the batch; `how` is passed to `accumulate`."""
    accumulate(backend, subject, **how)
    backend.step(NUM_ROWS)


def _check_answers(make: MakeBackend, worker: Worker, subject: Subject) -> None:
    """Outputs equal the model's, without gradient, trained or frozen."""
    batch, kind = subject.batch, subject.kind()
    expected = kind.answers(kind.build(worker.device), batch, entropies=True)
    for optimizer in (subject.readable, None):
        backend = make(kind, worker, optimizer=optimizer, num_shards=NUM_SHARDS)
        assert not backend.forward(batch).entropies.numel(), "entropies were not requested"
        outputs = backend.forward(batch, entropies=True)
        for name in ("logprobs", "entropies", "values"):
            answer, reference = getattr(outputs, name), getattr(expected, name).detach()
            assert not answer.requires_grad, f"forward() answers {name} with a gradient"
            assert answer.shape == reference.shape, f"forward(): {name} is {answer.shape}, not {reference.shape}"
            if reference.numel():
                _check_close(answer, reference, subject.bound, f"forward(): {name}")


def _check_layout(make: MakeBackend, worker: Worker, subject: Subject) -> None:
    """`weights()` has the buffers of `layout()`, filled with the model's values."""
    backend = make(subject.kind(), worker, optimizer=subject.readable, num_shards=NUM_SHARDS)
    buffers = backend.layout().ranks[worker.rank].buffers
    held = {name: (tuple(w.shape), str(w.dtype).removeprefix("torch.")) for name, w in backend.weights().items()}
    expected = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()}
    assert held == expected, f"weights() has {held}, layout() says {expected}"
    _check_weights(backend, worker, subject.kind().build(worker.device), 0.0, "a new backend")


def _check_updates(
    make: MakeBackend,
    worker: Worker,
    subject: Subject,
    settings: OptimizerSettings,
    num_shards: int,
    size: int,
    bound: float,
) -> None:
    """However a batch is split into micro-batches and shards, its statistics are those of the whole, and steps equal
    AdamW's on the clipped mean of the whole gradient, with the learning rates of the schedule."""
    batch, kind = subject.batch, subject.kind()
    backend = make(kind, worker, optimizer=settings, num_shards=num_shards)
    model = kind.build(worker.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=settings.betas, eps=settings.epsilon, weight_decay=settings.weight_decay
    )
    rows, other = subject.sums(batch)
    sums = [rows, other + num_shards]
    for number in range(4):
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(number)
        optimizer.zero_grad()
        (subject.loss(batch, kind.answers(model, batch, entropies=True)) / NUM_ROWS).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm))
        optimizer.step()
        totals = accumulate(backend, subject, size, num_shards)
        assert torch.allclose(torch.tensor(totals), torch.tensor(sums)), f"statistics {totals}, not {sums}"
        assert backend.num_steps == number, f"{backend.num_steps} steps after {number}"
        actual = backend.step(NUM_ROWS)
        assert abs(actual / norm - 1) <= 10 * bound, f"norm {actual}, not {norm}"
        _check_weights(backend, worker, model, bound, f"step {number} of {num_shards} shards, {size} rows at once")


def _check_not_finite(tried: TrainingBackend, other: TrainingBackend, subject: Subject) -> None:
    """A norm that is not finite raises, and leaves the backend as if the update had not been tried."""
    for backend in (tried, other):
        update(backend, subject)
    try:
        update(tried, subject, scale=math.inf)
    except FloatingPointError:
        _check_same(tried, other)
    else:
        raise AssertionError("step() took an infinite gradient")
    for backend in (tried, other):
        update(backend, subject)


def _check_offload(moved: TrainingBackend, stayed: TrainingBackend, subject: Subject) -> None:
    """An update that is offloaded at any point continues bitwise, also one that begins while everything is offloaded;
    so do buffers that `on_model` changes."""

    def aside() -> None:
        moved.offload()
        moved.onload()

    for backend, pause in ((stayed, lambda: None), (moved, aside)):
        for _ in range(2):
            if backend is moved:
                backend.offload()
            accumulate(backend, subject, pause=pause)
            pause()
            backend.step(NUM_ROWS)
            backend.on_model(subject.touch)


def _check_restart(used: TrainingBackend, new: TrainingBackend, subject: Subject) -> None:
    """A backend copies another's weights, and a new optimizer begins at 0 from the current weights."""
    update(used, subject)
    new.start_from(used)
    for backend in (used, new):
        backend.restart(subject.ordinary)
        assert backend.num_steps == 0, f"{backend.num_steps} steps of a new optimizer"
        update(backend, subject)


def _check_files(make: MakeBackend, worker: Worker, subject: Subject, folder: str) -> None:
    """Each tensor is written once, whole, and as a copy that the next step does not change; training continues bitwise
    from files, whoever wrote them."""
    one, other = (
        make(subject.kind(seed), worker, optimizer=subject.ordinary, num_shards=NUM_SHARDS) for seed in (0, 1)
    )
    for _ in range(2):
        update(one, subject)
    files = CheckpointFiles(worker, folder)
    files.add_model(one)
    files.add_optimizer(one)
    update(one, subject)
    files.start().wait()
    worker.ranks.barrier()
    _check_shapes(folder, subject)
    other.load_model(folder)
    other.load_optimizer(folder)
    assert other.num_steps == 2, f"{other.num_steps} steps loaded, 2 saved"
    update(other, subject)
    _check_same(other, one)


def _check_shapes(folder: str, subject: Subject) -> None:
    """Model and moments are whole in the files, under the model's names."""
    model = subject.kind().build(torch.device("cpu"))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    moments = {f"{name}:{moment}" for name, _ in model.named_parameters() for moment in ("exp_avg", "exp_avg_sq")}
    for stem, names in ((MODEL, set(shapes)), (OPTIMIZER, moments)):
        specs = WeightFiles(folder, stem).specs
        missing = names - specs.keys()
        assert not missing, f"the files of the {stem} lack {', '.join(sorted(missing))}"
        for name in names:
            actual, shape = specs[name].shape, shapes[name.partition(":")[0]]
            assert actual == shape, f"the files of the {stem}: {name} is {actual}, not {shape}"


def accumulate(
    backend: TrainingBackend,
    subject: Subject = CHOICES,
    size: int = 4,
    num_shards: int = NUM_SHARDS,
    *,
    scale: float = 1.0,
    pause: Callable[[], object] = lambda: None,
) -> list[float]:
    """Row r belongs to shard r % num_shards. Returns the summed statistics."""
    backend.begin(2)
    pause()
    for shard in backend.shards:
        for first in range(shard, NUM_ROWS, size * num_shards):
            part = subject.rows(slice(first, min(first + size * num_shards, NUM_ROWS), num_shards))
            backend.backward(shard, part, subject.loss_of(part, scale), entropies=True)
            pause()
        backend.count(shard, [0.0, 1.0])
    return backend.finish_backward()


def _check_weights(backend: TrainingBackend, worker: Worker, model: nn.Module, bound: float, what: str) -> None:
    for name, expected in parts_of(model.state_dict(), backend.layout())[worker.rank].items():
        _check_close(backend.weights()[name].detach(), expected, bound, f"{what}: {name}")


def _check_same(one: TrainingBackend, other: TrainingBackend) -> None:
    for name, weight in one.weights().items():
        assert_bitwise_equal(weight.detach(), other.weights()[name].detach())


def _check_close(actual: Tensor, expected: Tensor, bound: float, what: str) -> None:
    scale = float(expected.abs().max()) or 1.0
    worst = float((actual.double().cpu() - expected.double().cpu()).abs().max()) / scale
    assert worst <= bound, f"{what}: off by {worst:.3g} of the largest, allowed {bound:.3g}"

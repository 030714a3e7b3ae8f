"""The conformance suite of training backends, for one's own as for the shipped one.

    from rlinf_workers.testing.backends import check_backend
    check_backend(MyBackend, folder=str(tmp_path))

The model is a small network in float64; what a backend must compute is computed beside it by autograd and torch's AdamW
on the whole batch. Every function raises AssertionError with what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_algos.registry import path_of
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launcher.base import Identity
from rlinf_workers.launcher.local import LocalLauncher
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.registry import BACKENDS
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.testing.links import parts_of
from rlinf_workers.training.base import NOT_ASKED, Evaluation, LossOf, OptimizerSettings, Trainable, TrainingBackend
from rlinf_workers.training.checkpoint import MODEL, OPTIMIZER, CheckpointFiles
from rlinf_workers.worker import Worker

NUM_ROWS, NUM_INPUTS, NUM_CHOICES, NUM_SHARDS = 24, 5, 3, 2
BATCH = torch.randn(NUM_ROWS, NUM_INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
"""[rows, inputs]; row r chooses r % NUM_CHOICES, which is its last column."""
BATCH[:, -1] = torch.arange(NUM_ROWS) % NUM_CHOICES
READABLE = OptimizerSettings(learning_rate=1.0, epsilon=1.0, max_grad_norm=1e9)
"""Steps follow the size of the gradient."""
ORDINARY = OptimizerSettings(
    learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.05, warmup_steps=3, lr_decay_steps=10, min_lr_ratio=0.5
)

MakeBackend = Callable[..., TrainingBackend]
"""The class, or a function with the arguments of its constructor."""


class Chooser(Trainable):
    """A network that chooses, and says what a row is worth."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def build(self, device: torch.device) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            model = nn.Sequential(nn.Linear(NUM_INPUTS, 7), nn.Tanh(), nn.Linear(7, NUM_CHOICES + 1))
        model.register_buffer("count", torch.zeros(1))
        return model.double().to(device)

    def answers(self, model: Any, batch: Tensor, *, entropies: bool) -> Evaluation:
        found = model(batch)
        logprobs = found[:, :NUM_CHOICES].log_softmax(-1)
        return Evaluation(
            logprobs=logprobs.gather(1, batch[:, -1:].long())[:, 0],
            entropies=-(logprobs.exp() * logprobs).sum(-1) if entropies else NOT_ASKED,
            values=found[:, NUM_CHOICES],
        )


def check_backend(make: MakeBackend, folder: str, worker: Worker | None = None, *, bound: float = 1e-12) -> None:
    """All promises of `TrainingBackend`. In a group of several ranks each of them calls, with its own worker.

    Args:
        folder: an empty one for files, the same on all ranks.
        bound: how far, relatively to the largest, weights in float64 may be from autograd's and AdamW's.
    """
    worker = worker or trial_worker()
    _check_answers(make, worker, bound)
    _check_layout(make, worker)
    # clip_grad_norm_ adds 1e-6 to the norm, others need not
    for settings, num_shards, size, slack in (
        (READABLE, 2, 3, 1.0),
        (READABLE, 2, 12, 1.0),
        (READABLE, 4, 2, 1.0),
        (ORDINARY, 2, 4, 1e6),
    ):
        _check_updates(make, worker, settings, num_shards, size, slack * bound)
    for check in (_check_not_finite, _check_offload, _check_restart):
        one, other = (make(Chooser(), worker, optimizer=ORDINARY, num_shards=NUM_SHARDS) for _ in range(2))
        check(one, other)
        _check_same(one, other)
    _check_files(make, worker, folder)


def check_ranks(make: MakeBackend, folder: str, *, num_ranks: int, num_ranks_per_replica: int) -> None:
    """`check_backend` in a group of processes on this machine; `make` is a class that they can import."""
    with launched(LocalLauncher) as launcher:
        size = {"num_ranks": num_ranks, "num_ranks_per_replica": num_ranks_per_replica}
        ranks = start(launcher, Path(folder), Tested, **size)
        ranks.call("check", path_of(make), folder)


class Tested(Worker):
    """A rank of several that a backend works for."""

    def check(self, backend: str, folder: str) -> None:
        check_backend(BACKENDS.get(backend), folder, self)


def trial_worker() -> Worker:
    """A worker in this process for backends to work for, alone in its group."""
    return WorkerHost(Identity(role="tested", rank=0, num_ranks=1), lambda *_, **__: Future()).make(Worker)


def update(backend: TrainingBackend, **how: Any) -> None:
    """An update on the batch; `how` goes to `accumulate`."""
    accumulate(backend, **how)
    backend.step(NUM_ROWS)


def _check_answers(make: MakeBackend, worker: Worker, bound: float) -> None:
    """They are the model's, without gradient, trained or frozen."""
    expected = Chooser().answers(Chooser().build(worker.device), BATCH, entropies=True)
    for optimizer in (READABLE, None):
        backend = make(Chooser(), worker, optimizer=optimizer, num_shards=NUM_SHARDS)
        assert not backend.forward(BATCH).entropies.numel(), "entropies that nobody asked for"
        found = backend.forward(BATCH, entropies=True)
        for name in ("logprobs", "entropies", "values"):
            answer = getattr(found, name)
            assert not answer.requires_grad, f"forward() answers {name} with a gradient"
            _check_close(answer, getattr(expected, name).detach(), bound, f"forward(): {name}")


def _check_layout(make: MakeBackend, worker: Worker) -> None:
    """`weights()` has the buffers that `layout()` says, filled with the model."""
    backend = make(Chooser(), worker, optimizer=READABLE, num_shards=NUM_SHARDS)
    buffers = backend.layout().ranks[worker.rank].buffers
    held = {name: (tuple(w.shape), str(w.dtype).removeprefix("torch.")) for name, w in backend.weights().items()}
    said = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()}
    assert held == said, f"weights() has {held}, layout() says {said}"
    _check_weights(backend, worker, Chooser().build(worker.device), 0.0, "a new backend")


def _check_updates(
    make: MakeBackend, worker: Worker, settings: OptimizerSettings, num_shards: int, size: int, bound: float
) -> None:
    """However a batch is cut into micro-batches and shards, its statistics are those of the whole, and steps are
    AdamW's on the clipped mean of the whole gradient, at the rates of the schedule."""
    backend = make(Chooser(), worker, optimizer=settings, num_shards=num_shards)
    model = Chooser().build(worker.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=settings.betas, eps=settings.epsilon, weight_decay=settings.weight_decay
    )
    sums = [float(NUM_ROWS), float(BATCH[:, 0].sum()) + num_shards]
    for number in range(4):
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(number)
        optimizer.zero_grad()
        (_loss(BATCH)(Chooser().answers(model, BATCH, entropies=True))[0] / NUM_ROWS).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm))
        optimizer.step()
        totals = accumulate(backend, size, num_shards)
        assert torch.allclose(torch.tensor(totals), torch.tensor(sums)), f"statistics {totals}, not {sums}"
        assert backend.num_steps == number, f"{backend.num_steps} steps after {number}"
        found = backend.step(NUM_ROWS)
        assert abs(found / norm - 1) <= 10 * bound, f"norm {found}, not {norm}"
        _check_weights(backend, worker, model, bound, f"step {number} of {num_shards} shards, {size} rows at once")


def _check_not_finite(tried: TrainingBackend, other: TrainingBackend) -> None:
    """A norm that is not finite is an error, and afterwards all is as if the update had not been tried."""
    for backend in (tried, other):
        update(backend)
    try:
        update(tried, scale=math.inf)
    except FloatingPointError:
        _check_same(tried, other)
    else:
        raise AssertionError("step() took an infinite gradient")
    for backend in (tried, other):
        update(backend)


def _check_offload(moved: TrainingBackend, stayed: TrainingBackend) -> None:
    """An update that is put aside at any point goes on to the bit, and so do buffers that `on_model` changes."""

    def aside() -> None:
        moved.offload()
        moved.onload()

    for backend, pause in ((stayed, lambda: None), (moved, aside)):
        for _ in range(2):
            accumulate(backend, pause=pause)
            pause()
            backend.step(NUM_ROWS)
            backend.on_model(lambda model: model.count.add_(1))


def _check_restart(used: TrainingBackend, new: TrainingBackend) -> None:
    """A backend takes over another's weights, and a new optimizer begins at 0 from the weights that are there."""
    update(used)
    new.start_from(used)
    for backend in (used, new):
        backend.restart(ORDINARY)
        assert backend.num_steps == 0, f"{backend.num_steps} steps of a new optimizer"
        update(backend)


def _check_files(make: MakeBackend, worker: Worker, folder: str) -> None:
    """Each tensor is written once, whole, and not the buffer that the next step writes into; training goes on from
    files to the bit, whoever wrote them."""
    one, other = (make(Chooser(seed), worker, optimizer=ORDINARY, num_shards=NUM_SHARDS) for seed in (0, 1))
    for _ in range(2):
        update(one)
    files = CheckpointFiles(worker, folder)
    files.add_model(one)
    files.add_optimizer(one)
    update(one)
    files.start().wait()
    worker.ranks.barrier()
    _check_shapes(folder)
    other.load_model(folder)
    other.load_optimizer(folder)
    assert other.num_steps == 2, f"{other.num_steps} steps loaded, 2 saved"
    update(other)
    _check_same(other, one)


def _check_shapes(folder: str) -> None:
    """Model and moments are whole in the files, under the model's names."""
    model = Chooser().build(torch.device("cpu"))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    moments = {f"{name}:{moment}" for name, _ in model.named_parameters() for moment in ("exp_avg", "exp_avg_sq")}
    for stem, wanted in ((MODEL, set(shapes)), (OPTIMIZER, moments)):
        specs = WeightFiles(folder, stem).specs
        missing = wanted - specs.keys()
        assert not missing, f"the files of the {stem} lack {', '.join(sorted(missing))}"
        for name in wanted:
            found, shape = specs[name].shape, shapes[name.partition(":")[0]]
            assert found == shape, f"the files of the {stem}: {name} is {found}, not {shape}"


def _loss(batch: Tensor, scale: float = 1.0) -> LossOf:
    """A summed loss of all three answers; its statistics are the rows and the sum of their first input."""

    def loss_of(answers: Evaluation) -> tuple[Tensor, Sequence[float]]:
        terms = (answers.values - batch[:, 0]).square() - answers.logprobs - 0.1 * answers.entropies
        return scale * terms.sum(), [float(len(batch)), float(batch[:, 0].sum())]

    return loss_of


def accumulate(
    backend: TrainingBackend,
    size: int = 4,
    num_shards: int = NUM_SHARDS,
    *,
    scale: float = 1.0,
    pause: Callable[[], object] = lambda: None,
) -> list[float]:
    """Row r belongs to shard r % num_shards. Returns the reduced statistics."""
    backend.begin(2)
    for shard in backend.shards:
        for part in BATCH[shard::num_shards].split(size):
            backend.backward(shard, part, _loss(part, scale), entropies=True)
            pause()
        backend.count(shard, [0.0, 1.0])
    return backend.reduce()


def _check_weights(backend: TrainingBackend, worker: Worker, model: nn.Module, bound: float, what: str) -> None:
    for name, expected in parts_of(model.state_dict(), backend.layout())[worker.rank].items():
        _check_close(backend.weights()[name].detach(), expected, bound, f"{what}: {name}")


def _check_same(one: TrainingBackend, other: TrainingBackend) -> None:
    for name, weight in one.weights().items():
        assert_bitwise_equal(weight.detach(), other.weights()[name].detach())


def _check_close(found: Tensor, expected: Tensor, bound: float, what: str) -> None:
    scale = float(expected.abs().max()) or 1.0
    worst = float((found.double().cpu() - expected.double().cpu()).abs().max()) / scale
    assert worst <= bound, f"{what}: off by {worst:.3g} of the largest, allowed {bound:.3g}"

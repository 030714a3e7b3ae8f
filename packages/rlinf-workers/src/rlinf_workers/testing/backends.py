"""The conformance suite of training backends, for one's own as for the shipped one.

    from rlinf_workers.testing.backends import check_backend
    check_backend(MyBackend, folder=str(tmp_path))

The model is a small network in float64; what a backend must compute is computed beside it by autograd on the whole
batch. The gradient is read off the first step of AdamW with a learning rate and an epsilon of 1, which moves a weight
by -g / (|g| + 1). Every function raises AssertionError with what was expected and what came.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.weights import Layout
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launcher.base import Identity
from rlinf_workers.training.base import NOT_ASKED, Evaluation, LossOf, OptimizerSettings, TrainingBackend
from rlinf_workers.worker import Worker

NUM_ROWS, NUM_INPUTS, NUM_CHOICES, NUM_SHARDS = 24, 5, 3, 2
READABLE = OptimizerSettings(learning_rate=1.0, epsilon=1.0, max_grad_norm=1e9)
"""The first step tells the gradient."""
ORDINARY = OptimizerSettings(
    learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.05, warmup_steps=3, lr_decay_steps=10, min_lr_ratio=0.5
)

MakeBackend = Callable[..., TrainingBackend]


def trial_worker(identity: Identity | None = None) -> Worker:
    """A worker in this process for backends to work for: alone in its group, unless said otherwise."""
    return WorkerHost(identity or Identity(role="tested", rank=0, num_ranks=1), lambda *_, **__: Future()).make(Worker)


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of n rows."""

    inputs: Tensor
    """[n, NUM_INPUTS] float64"""
    choices: Tensor
    """[n] int64"""

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.inputs[rows], self.choices[rows])


class Chooser:
    """A Trainable: a network that chooses, and says what a row is worth."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def build(self, device: torch.device) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            model = nn.Sequential(nn.Linear(NUM_INPUTS, 7), nn.Tanh(), nn.Linear(7, NUM_CHOICES + 1))
        model.register_buffer("count", torch.zeros(1))
        return model.double().to(device)

    def answers(self, model: Any, batch: Rows, *, entropies: bool) -> Evaluation:
        found = model(batch.inputs)
        logprobs = found[:, :NUM_CHOICES].log_softmax(-1)
        return Evaluation(
            logprobs=logprobs.gather(1, batch.choices[:, None])[:, 0],
            entropies=-(logprobs.exp() * logprobs).sum(-1) if entropies else NOT_ASKED,
            values=found[:, NUM_CHOICES],
        )

    def save(self, model: Any, folder: str) -> None:
        save_file(model.state_dict(), f"{folder}/chooser.safetensors")

    def load(self, model: Any, folder: str) -> None:
        model.load_state_dict(load_file(f"{folder}/chooser.safetensors"))


def check_backend(make: MakeBackend, folder: str, worker: Worker | None = None, *, bound: float = 1e-12) -> None:
    """All promises of `TrainingBackend`. In a group of several ranks each of them calls, with its own worker.

    Args:
        make: the class, or a function with the arguments of its constructor.
        folder: an empty one for files, the same on all ranks.
        bound: how far, relatively to the largest, a gradient in float64 may be from autograd's.
    """
    worker = worker or trial_worker()
    for check in (check_forward, check_layout, check_gradient, check_step):
        check(make, worker, bound)
    for check in (check_not_finite, check_offload, check_restart):
        check(make, worker)
    check_files(make, worker, folder)


def check_ranks(make: MakeBackend, folder: str, *, num_ranks: int, num_ranks_per_replica: int) -> None:
    """`check_backend` in a group of processes on this machine; `make` is a class that they can import."""
    context = multiprocessing.get_context("spawn")
    identities = [
        Identity(
            role="tested",
            rank=rank,
            num_ranks=num_ranks,
            num_ranks_per_replica=num_ranks_per_replica,
            rendezvous=f"{folder}/rendezvous",
        )
        for rank in range(num_ranks)
    ]
    ranks = [context.Process(target=_check_rank, args=(make, folder, identity)) for identity in identities]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    failed = [identity.name for identity, process in zip(identities, ranks, strict=True) if process.exitcode]
    assert not failed, f"{', '.join(failed)} failed; the traceback is above"


def _check_rank(make: MakeBackend, folder: str, identity: Identity) -> None:
    torch.set_num_threads(1)
    check_backend(make, folder, trial_worker(identity))


def check_forward(make: MakeBackend, worker: Worker, bound: float) -> None:
    """Answers are the model's, without gradient, trained or frozen."""
    batch, expected = _batch(), Chooser().answers(Chooser().build(worker.device), _batch(), entropies=True)
    for optimizer in (READABLE, None):
        backend = make(Chooser(), worker, optimizer=optimizer, num_shards=NUM_SHARDS)
        assert not backend.forward(batch).entropies.numel(), "entropies that nobody asked for"
        found = backend.forward(batch, entropies=True)
        for name in ("logprobs", "entropies", "values"):
            answer = getattr(found, name)
            assert not answer.requires_grad, f"forward() answers {name} with a gradient"
            _close(answer, getattr(expected, name).detach(), bound, f"forward(): {name}")


def check_layout(make: MakeBackend, worker: Worker, bound: float) -> None:
    """`weights()` has the buffers that `layout()` says, filled with the model."""
    backend = make(Chooser(), worker, optimizer=READABLE, num_shards=NUM_SHARDS)
    buffers = backend.layout().ranks[worker.ranks.rank].buffers
    held = {name: (tuple(w.shape), str(w.dtype).removeprefix("torch.")) for name, w in backend.weights().items()}
    said = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()}
    assert held == said, f"weights() has {held}, layout() says {said}"
    _check_weights(backend, worker, _state(Chooser().build(worker.device)), 0.0, "a new backend")


def check_gradient(make: MakeBackend, worker: Worker, bound: float) -> None:
    """However a batch is cut into micro-batches and shards, its gradient and its statistics are those of the whole."""
    model = Chooser().build(worker.device)
    _loss(_batch())(Chooser().answers(model, _batch(), entropies=True))[0].backward()
    expected = {name: _moved(parameter) for name, parameter in model.named_parameters()} | {"count": torch.zeros(1)}
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)) / NUM_ROWS
    for num_shards, size in ((2, 3), (2, 12), (4, 2)):
        backend = make(Chooser(), worker, optimizer=READABLE, num_shards=num_shards)
        totals = _accumulate(backend, size, num_shards)
        sums = [float(NUM_ROWS), float(_batch().inputs[:, 0].sum()) + num_shards]
        assert torch.allclose(torch.tensor(totals), torch.tensor(sums)), f"statistics {totals}, not {sums}"
        found = backend.step(NUM_ROWS)
        assert abs(found / norm - 1) <= 10 * bound, f"norm {found}, not {norm}"
        _check_weights(backend, worker, expected, bound, f"a step of {num_shards} shards, {size} rows a micro-batch")


def check_step(make: MakeBackend, worker: Worker, bound: float) -> None:
    """Steps are AdamW's on the clipped mean, at the rates of the schedule."""
    backend = make(Chooser(), worker, optimizer=ORDINARY, num_shards=NUM_SHARDS)
    model = Chooser().build(worker.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=ORDINARY.betas, weight_decay=ORDINARY.weight_decay)
    for number in range(4):
        optimizer.param_groups[0]["lr"] = ORDINARY.learning_rate_at(number)
        optimizer.zero_grad()
        (_loss(_batch())(Chooser().answers(model, _batch(), entropies=True))[0] / NUM_ROWS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), ORDINARY.max_grad_norm)
        optimizer.step()
        assert backend.num_steps == number, f"{backend.num_steps} steps after {number}"
        _update(backend)
    _check_weights(backend, worker, _state(model), 1e6 * bound, "four steps")  # clip_grad_norm_ adds 1e-6 to the norm


def check_not_finite(make: MakeBackend, worker: Worker) -> None:
    """A norm that is not finite is an error, and afterwards all is as if the update had not been tried."""
    tried, other = (make(Chooser(), worker, optimizer=ORDINARY, num_shards=NUM_SHARDS) for _ in range(2))
    for backend in (tried, other):
        _update(backend)
    before = {name: weight.detach().clone() for name, weight in tried.weights().items()}
    _accumulate(tried, scale=math.inf)
    try:
        tried.step(NUM_ROWS)
    except FloatingPointError:
        pass
    else:
        raise AssertionError("step() took an infinite gradient")
    for name, weight in tried.weights().items():
        assert_bitwise_equal(weight.detach(), before[name])
    for backend in (tried, other):
        _update(backend)
    _check_same(tried, other)


def check_files(make: MakeBackend, worker: Worker, folder: str) -> None:
    """Training goes on from files to the bit; a model starts from another's weights."""
    one = make(Chooser(), worker, optimizer=ORDINARY, num_shards=NUM_SHARDS)
    for _ in range(2):
        _update(one)
    one.save_model(f"{folder}/model")
    one.save_optimizer(folder)
    worker.ranks.barrier()
    other = make(Chooser(seed=1), worker, optimizer=ORDINARY, num_shards=NUM_SHARDS)
    other.load_model(f"{folder}/model")
    other.load_optimizer(folder)
    assert other.num_steps == 2, f"{other.num_steps} steps loaded, 2 saved"
    third = make(Chooser(seed=2), worker, optimizer=ORDINARY, num_shards=NUM_SHARDS)
    third.start_from(one)
    _check_same(third, one)
    for backend in (one, other):
        _update(backend)
    _check_same(other, one)


def check_offload(make: MakeBackend, worker: Worker) -> None:
    """An update that is put aside at any point goes on to the bit, and so do buffers that `on_model` changes."""
    moved, stayed = (make(Chooser(), worker, optimizer=ORDINARY, num_shards=NUM_SHARDS) for _ in range(2))

    def aside() -> None:
        moved.offload()
        moved.onload()

    for backend, pause in ((stayed, lambda: None), (moved, aside)):
        for _ in range(2):
            _accumulate(backend, pause=pause)
            pause()
            backend.step(NUM_ROWS)
            backend.on_model(lambda model: model.count.add_(1))
    _check_same(moved, stayed)


def check_restart(make: MakeBackend, worker: Worker) -> None:
    """A new optimizer begins at 0 from the weights that are there."""
    used, new = (make(Chooser(), worker, optimizer=READABLE, num_shards=NUM_SHARDS) for _ in range(2))
    _update(used)
    new.start_from(used)
    for backend in (used, new):
        backend.restart(ORDINARY)
        assert backend.num_steps == 0, f"{backend.num_steps} steps of a new optimizer"
        _update(backend)
    _check_same(used, new)


def _batch() -> Rows:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_ROWS, NUM_INPUTS, dtype=torch.float64, generator=generator)
    return Rows(inputs, torch.randint(NUM_CHOICES, (NUM_ROWS,), generator=generator))


def _loss(batch: Rows, scale: float = 1.0) -> LossOf:
    """A summed loss of all three answers; its statistics are the rows and the sum of their first input."""

    def loss_of(answers: Evaluation) -> tuple[Tensor, Sequence[float]]:
        terms = (answers.values - batch.inputs[:, 0]).square() - answers.logprobs - 0.1 * answers.entropies
        return scale * terms.sum(), [float(len(batch.choices)), float(batch.inputs[:, 0].sum())]

    return loss_of


def _accumulate(
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
        for start in range(shard, NUM_ROWS, num_shards * size):
            part = _batch()[slice(start, min(NUM_ROWS, start + num_shards * size), num_shards)]
            backend.backward(shard, part, _loss(part, scale), entropies=True)
            pause()
        backend.count(shard, [0.0, 1.0])
    return backend.reduce()


def _update(backend: TrainingBackend) -> None:
    _accumulate(backend)
    backend.step(NUM_ROWS)


def _moved(parameter: Tensor) -> Tensor:
    """Where a step of READABLE puts it."""
    assert parameter.grad is not None
    gradient = parameter.grad / NUM_ROWS
    return parameter.detach() - gradient / (gradient.abs() + 1.0)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _check_weights(
    backend: TrainingBackend, worker: Worker, whole: Mapping[str, Tensor], bound: float, what: str
) -> None:
    for name, expected in _parts(backend.layout(), worker.ranks.rank, whole).items():
        _close(backend.weights()[name].detach(), expected, bound, f"{what}: {name}")


def _parts(layout: Layout, rank: int, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers of a rank, cut out of whole tensors."""
    mine = layout.ranks[rank]
    buffers = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in mine.buffers.items()}
    for block in mine.blocks:
        box = tuple(slice(s, s + n) for s, n in zip(block.box.start, block.box.shape, strict=True))
        place = buffers[block.buffer].as_strided(block.box.shape, block.strides, block.offset)
        place.copy_(whole[block.name][box])
    return buffers


def _check_same(one: TrainingBackend, other: TrainingBackend) -> None:
    for name, weight in one.weights().items():
        assert_bitwise_equal(weight.detach(), other.weights()[name].detach())


def _close(found: Tensor, expected: Tensor, bound: float, what: str) -> None:
    scale = float(expected.abs().max()) or 1.0
    worst = float((found.double().cpu() - expected.double().cpu()).abs().max()) / scale
    assert worst <= bound, f"{what}: off by {worst:.3g} of the largest, allowed {bound:.3g}"

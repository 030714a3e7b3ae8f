"""TrainingBackend: how a model is held and trained on the ranks of a worker group.

A role (actor, critic, reference, embodied actor) creates one from its `BackendSettings` and a `ModelAdapter`, which
defines the kind of model, and handles weights only through it. One update, in the order of the calls:

    backend.begin(num_statistics)
    backend.backward(shard, batch, loss_of)       for each micro-batch of each of backend.shards
    totals = backend.finish_backward()            sums of the statistics, over all shards of all replicas
    backend.step(divisor)                         the summed gradient / divisor, clipped, one optimizer step

Every rank makes the same calls in the same order, except for `backward` and `count`, which each replica calls for its
own shards; all ranks of a replica get the same micro-batches, and model outputs are complete on each. Losses are
*sums*, so that they add up over micro-batches, shards and replicas. The loss is a function of the model outputs, so a
backend may run the passes of several micro-batches together, or compute the loss only on the last pipeline stage.
`rlinf_workers.testing.backends` checks an implementation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlinf_comm import record
from rlinf_comm.weights import Layout
from rlinf_workers.collectives import RankGroup
from rlinf_workers.models.placement import tensors_of
from rlinf_workers.models.weight_names import StoredWeights, plain_weights
from rlinf_workers.plugins import TRAINERS
from rlinf_workers.trainers.checkpoint import MODEL
from rlinf_workers.trainers.served import Served
from rlinf_workers.trainers.statistics import Statistics
from rlinf_workers.worker import Worker

T = TypeVar("T")


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    learning_rate: float
    value_learning_rate: float | None = None
    """Learning rate of parameters whose names begin with "value" (a policy's critic). None: the common learning
    rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_warmup_steps: int = 0
    """Linear warmup, from 1/lr_warmup_steps."""
    lr_decay_steps: int | None = None
    """Linear decay from 1 to `min_lr_ratio` over this many optimizer steps, constant afterwards; None: constant."""
    min_lr_ratio: float = 0.0
    """Fraction of the learning rate after `lr_decay_steps`."""

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        return self.learning_rate * self._factor_at(step)

    def _factor_at(self, step: int) -> float:
        factor = 1.0
        if self.lr_decay_steps:
            progress = min(1.0, step / self.lr_decay_steps)
            factor = 1.0 - (1.0 - self.min_lr_ratio) * progress
        if self.lr_warmup_steps:
            factor *= min(1.0, (step + 1) / self.lr_warmup_steps)
        return factor

    def adamw(self, parameters: Iterable[tuple[str, nn.Parameter]], *, fused: bool | None = None) -> torch.optim.AdamW:
        """A new optimizer at the full learning rate; `begin_step` sets that of each step.

        Args:
            parameters: pairs of name and parameter.
            fused: as torch's; True: one pass over each parameter and its moments.
        """
        groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, parameter in parameters:
            groups[self.value_learning_rate is not None and name.startswith("value")].append(parameter)
        return torch.optim.AdamW(
            [{"params": group, "is_value": is_value} for is_value, group in groups.items() if group],
            self.learning_rate,
            betas=self.betas,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            fused=fused,
        )

    def begin_step(self, optimizer: torch.optim.Optimizer, step: int, grad_norm: float, worker: Worker) -> None:
        """Sets the learning rate of optimizer step `step`.

        Raises: FloatingPointError if the norm of its gradient is not finite.
        """
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"{worker.name}: optimizer step {step}: the gradient norm is {grad_norm}; nothing was changed"
            )
        for group in optimizer.param_groups:
            rate = self.value_learning_rate if group.get("is_value") else self.learning_rate
            assert rate is not None, "the parameter group of values exists only if it has a learning rate"
            group["lr"] = rate * self._factor_at(step)

    def clip_factor(self, grad_norm: float) -> float:
        """Factor for a gradient of this norm, computed as torch does for clipping."""
        return min(1.0, self.max_grad_norm / (grad_norm + 1e-6))


def shards_of(num_shards: int, rank: int, num_ranks: int, *, ranks: str = "ranks") -> range:
    """The shards of a batch that a rank computes.

    Args:
        ranks: "replicas" if replicas, not ranks, share the shards.

    Raises: ValueError if the shards cannot be divided evenly.
    """
    if num_shards % num_ranks:
        raise ValueError(
            f"num_shards={num_shards} is not a multiple of its {num_ranks} {ranks}; use {num_ranks} or a multiple of it"
        )
    return range(rank, num_shards, num_ranks)


def sequence_ranks(kind: ModelAdapter, worker: Worker, sequence_parallel: int) -> RankGroup | None:
    """The ranks that compute each micro-batch together; None: each rank computes its own.

    Raises: ValueError where the replicas of the worker group have another size, or ranks cannot share such a model's
    micro-batches.
    """
    if sequence_parallel == 1:
        return None
    at, size = f"actor.backend_options.sequence_parallel={sequence_parallel}", worker.identity.num_ranks_per_replica
    if size != sequence_parallel:
        raise ValueError(f"{at}: it is the number of ranks of a replica, and here they have {size}")
    if not kind.shares_rows:
        raise ValueError(f"{at}: {type(kind).__name__} has no sequences that ranks can share")
    return worker.replica_ranks


NOT_ASKED = torch.zeros(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutputs:
    """Outputs of a forward pass for the loss; [B, T] for the completion tokens of language models. For the n rows of a
    policy, log-probabilities and entropies are [n, K, D], for D numbers or tokens of each of K actions, and values are
    [n] or [n, K].

    Complete on every rank that calls, at least float32, on the backend's device.
    """

    logprobs: Tensor = NOT_ASKED
    """Nats; empty for a model that only has values."""
    entropies: Tensor = NOT_ASKED
    """Nats; empty if not requested or if the model only has values."""
    values: Tensor = NOT_ASKED
    """Expected remaining rewards; empty for a model without a critic."""
    router_loss: Tensor = NOT_ASKED
    """Scalar, the load-balancing loss of the batch; only for models built to return it, and only with gradients."""
    router_agreement: Tensor = NOT_ASKED
    """Scalar, the share of the engine's choices of experts that the model's own routers make, too (in a pipeline those
    of its last stage); only for models built to replay them."""
    logit_norms: Tensor = NOT_ASKED
    """Only from `LogitNorms`: `rlinf_algos.logit_norms` of the tokens."""
    is_likeliest: Tensor = NOT_ASKED
    """Only from `Likeliest`: 1.0 for tokens that are the most likely ones, else 0.0."""


class ModelAdapter(ABC):
    """One kind of model: how to build it, what it outputs, and the format of its files."""

    stem = MODEL
    """Prefix of its files with tensors."""
    has_adapter = False
    """Whether an adapter is trained, so that `Served` has changes."""
    shares_rows = False
    """Whether ranks can compute a micro-batch together (models/sequence_parallel.py)."""

    @abstractmethod
    def build(self, device: torch.device) -> nn.Module:
        """The model with its initial weights, the same in every process."""

    @abstractmethod
    def answers(self, model: Any, batch: Any, *, entropies: bool) -> ModelOutputs:
        """One differentiable forward pass; the batch is on the model's device."""

    def base_answers(self, model: Any, batch: Any) -> ModelOutputs:
        """Like `answers`, without the model's adapter."""
        raise NotImplementedError(f"{type(self).__name__} has no adapter")

    def num_calls(self, batch: Any) -> int:
        """How often `answers` calls the model; ranks that share a model must call it equally often."""
        return 1

    def outline(self) -> nn.Module | None:
        """The model of `build` without memory for its weights, for a backend that shards them over ranks; called inside
        `models.sharded_init.ShardedInit`. None: this kind can only be built whole."""
        return None

    def first_weights(self, model: Any) -> StoredWeights | None:
        """The initial weights of an `outline` that are stored in files; None: all of them were initialized."""
        return None

    def stored_weights(self, model: Any, folder: str) -> StoredWeights:
        """The weights that `load` would read, for an `outline`. Raises: WeightFilesError, like `load`."""
        return plain_weights(model, folder)

    def served(self, tensors: Mapping[str, Tensor]) -> Served:
        """The tensors that a weight sync reads.

        Args:
            tensors: all tensors of the model, by name.
        """
        return Served(weights=tensors)

    def is_frozen(self, name: str) -> bool:
        """Whether the canonical tensor never changes; only called for a model with an adapter."""
        return False

    def saved(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of the model that its files contain; they include every trained one."""
        return tensors

    def written_together(self, model: Any, names: Iterable[str]) -> Iterable[Sequence[str]]:
        """Names of the model's tensors, grouped by the file tensor that `to_files` makes of them."""
        return ([name] for name in names)

    def to_files(self, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Converts tensors of the model to file tensors; `tensors` contains whole groups of `written_together`."""
        return tensors

    def describe(self, folder: str) -> None:
        """Writes the other files of a model's folder: config, tokenizer. Called in a thread."""
        return

    def load(self, model: Any, folder: str) -> None:
        """Fills the model in place. Raises: WeightFilesError naming tensors that are missing or have another shape."""
        stored = plain_weights(model, folder)
        stored.files.fill(stored.layout, 0, tensors_of(model))


LossOf = Callable[[ModelOutputs], tuple[Tensor, Statistics]]
"""Model outputs of a micro-batch -> its summed loss, and its statistics, which are sums too."""


def defers_checks(device: torch.device) -> bool:
    """Whether a backend reads checks of values and statistics of an update at its end (rlinf_algos.DeferredChecks): on
    GPUs, where reading each would leave the device without work."""
    return device.type == "cuda"


class TrainingBackend(Protocol):
    """A model on the ranks of a worker group.

    Constructed as `cls(model, worker, optimizer=..., num_shards=..., **options)`: the worker provides the device and
    the collectives, the options come from the recipe. Without an optimizer the model is frozen, and the methods from
    `begin` to `step` must not be called. A backend first uses its GPU in `onload`, because others may hold it before.
    """

    @property
    def kind(self) -> ModelAdapter:
        """The model adapter that it was constructed with."""
        ...

    @property
    def shards(self) -> Sequence[int]:
        """The shards of a batch that this replica computes, ascending; the recipe fixes their total number."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps of the current optimizer; also the index of the next one for the learning rate schedule."""
        ...

    def forward(self, batch: Any, *, entropies: bool = False, adapter: bool = True) -> ModelOutputs:
        """Model outputs without gradients. They depend only on the weights and the batch.

        Args:
            adapter: False: output of the model without its adapter; without entropies. Only called on a backend that
                `trains_adapters` (its spec), for a model with an adapter.
        """
        ...

    def begin(self, num_statistics: int) -> None:
        """Begins an update: zeroes gradients and statistics. The caller may not hold the device yet."""

    def backward(self, shard: int, batch: Any, loss_of: LossOf, *, entropies: bool = False) -> None:
        """Adds the gradient of a micro-batch's loss, and its statistics, to one shard of this replica. A backend may
        postpone the pass to `finish_backward`."""

    def count(self, shard: int, statistics: Statistics) -> None:
        """Adds the statistics of a micro-batch without gradient."""

    def finish_backward(self) -> list[float]:
        """Completes the backward passes and sums the gradient, and the statistics (float64), over all shards of all
        replicas."""
        ...

    def step(self, divisor: float) -> float:
        """Divides the summed gradient, clips it to `max_grad_norm` and takes an optimizer step.

        Returns: the norm of the gradient / divisor before clipping.
        Raises: FloatingPointError on every rank if the norm is not finite; no weight has changed.
        """
        ...

    def sum_over_shards(self, rows: Tensor) -> Tensor:
        """[shards of this replica, ...] on the CPU, in the order of `shards` -> [...], their sum over all replicas."""
        ...

    def restart(self, optimizer: OptimizerSettings) -> None:
        """Replaces the optimizer by a new one, whose state and schedule begin at 0."""

    def start_from(self, other: Any) -> None:
        """Copies the weights of another backend of this class in this process: all tensors that both have with the same
        shape, so not a head that differs."""

    def on_model(self, do: Callable[[Any], T]) -> T:
        """Updates buffers that are not trained by gradients, such as running statistics: `do` reads or changes them, in
        the same way on every rank."""
        ...

    def weights(self, *, merged: bool = True) -> Mapping[str, Tensor]:
        """This rank's shard of the served weights (`ModelAdapter.served`), as described by `layout`; every rank calls.
        No copies, except of weights with an adapter, which are merged when they are read.

        Args:
            merged: False: the adapter's tensors beside the weights that they change (rlinf_comm.weights.layouts). Only
                for a model with an adapter.
        """
        ...

    def layout(self, *, merged: bool = True) -> Layout:
        """The placement of the shards on the ranks of this group; the same on every rank."""
        ...

    def onload(self) -> None:
        """Moves model, optimizer state and gradients onto the device."""

    def offload(self) -> None:
        """Moves them off the device. An update in progress can continue after `onload`."""

    def model_tensors(self) -> Mapping[str, Tensor]:
        """Copies, in host memory, of the tensors that this rank writes: whole, in file format. Every rank calls;
        together they return each tensor once, with about equally many bytes per rank."""
        ...

    def load_model(self, folder: str) -> None:
        """Loads a model that any number of ranks of any backend wrote."""

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """Like `model_tensors`, for the optimizer's state: named `<parameter>:<state>`, by the model's parameter
        names."""
        ...

    def load_optimizer(self, folder: str) -> None:
        """Loads an optimizer's state and step count; with the same ranks, training continues bit for bit."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSettings:
    """Which backend holds the model, and its options."""

    name: str = "replicated"
    """A registered name, or an import path `package.module:Class`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of its constructor."""
    num_shards: int = 1

    def make(self, model: ModelAdapter, worker: Worker, optimizer: OptimizerSettings | None = None) -> TrainingBackend:
        """Creates the backend on the worker's device."""
        backend_class = TRAINERS.get(self.name)
        return backend_class(model, worker, optimizer=optimizer, num_shards=self.num_shards, **self.options)

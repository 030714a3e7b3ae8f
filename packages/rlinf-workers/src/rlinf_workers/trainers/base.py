"""TrainingBackend: how a model is held and trained on the ranks of a worker group.

A role (actor, critic, reference, embodied actor) makes one from its `BackendSettings` and a `ModelAdapter`, which says
what kind of model it is, and speaks to nothing else about weights. One update, in the order of the calls:

    backend.begin(num_statistics)
    backend.backward(shard, batch, loss_of)       for each micro-batch of each of backend.shards
    totals = backend.reduce()                     sums of the statistics, over all shards of all replicas
    backend.step(divisor)                         the summed gradient / divisor, clipped, one optimizer step

Every rank makes the same calls in the same order, but for `backward` and `count`, of which each replica makes those of
its own shards; all ranks of a replica get the same micro-batches, and answers are whole on each. Losses are *sums*, so
that they add up over micro-batches, shards and replicas. A loss is given as a function of what the model answers: a
backend may run forward and backward of several micro-batches at once, or the last stage of a pipeline alone.
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
from rlinf_workers.models.placement import tensors_of
from rlinf_workers.models.weight_names import StoredWeights, plain_weights
from rlinf_workers.plugins import TRAINERS
from rlinf_workers.trainers.checkpoint import MODEL
from rlinf_workers.trainers.served import Served
from rlinf_workers.worker import Worker

T = TypeVar("T")


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    learning_rate: float
    value_learning_rate: float | None = None
    """Of the parameters whose names begin with "value": a policy's critic. None: that of all."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_warmup_steps: int = 0
    """Linear, from 1/lr_warmup_steps."""
    lr_decay_steps: int | None = None
    """Linear decay from 1 to `min_lr_ratio` over that many optimizer steps, constant afterwards; None: constant."""
    min_lr_ratio: float = 0.0
    """Share of the learning rate that is left after `lr_decay_steps`."""

    def learning_rate_at(self, step: int) -> float:
        """For optimizer step `step`, counted from 0."""
        return self.learning_rate * self._factor_at(step)

    def _factor_at(self, step: int) -> float:
        factor = 1.0
        if self.lr_decay_steps:
            progress = min(1.0, step / self.lr_decay_steps)
            factor = 1.0 - (1.0 - self.min_lr_ratio) * progress
        if self.lr_warmup_steps:
            factor *= min(1.0, (step + 1) / self.lr_warmup_steps)
        return factor

    def adamw(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
        """Without state, at the full learning rate; who steps sets that of the step.

        Args:
            parameters: with their names.
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
        )

    def begin_step(self, optimizer: torch.optim.Optimizer, step: int, grad_norm: float, worker: Worker) -> None:
        """Sets the learning rate of optimizer step `step`.

        Raises: FloatingPointError when the norm of its gradient is not finite.
        """
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"{worker.name}: optimizer step {step}: the gradient norm is {grad_norm}; nothing was changed"
            )
        for group in optimizer.param_groups:
            rate = self.value_learning_rate if group.get("is_value") else self.learning_rate
            assert rate is not None, "a group of values is made where they have a learning rate"
            group["lr"] = rate * self._factor_at(step)

    def clip_factor(self, grad_norm: float) -> float:
        """What a gradient of this norm is multiplied by, as torch clips."""
        return min(1.0, self.max_grad_norm / (grad_norm + 1e-6))


def shards_of(num_shards: int, rank: int, num_ranks: int, *, ranks: str = "ranks") -> range:
    """The shards of a batch that a rank works on.

    Args:
        ranks: "replicas" where a replica works on its shards as a rank does.

    Raises: ValueError where they cannot have equally many.
    """
    if num_shards % num_ranks:
        raise ValueError(
            f"num_shards={num_shards} is not a multiple of its {num_ranks} {ranks}; use {num_ranks} or a multiple of it"
        )
    return range(rank, num_shards, num_ranks)


NOT_ASKED = torch.zeros(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutputs:
    """What a model says of a batch; [B, T] for the completion tokens of language models. Of the n rows of a policy
    log-probabilities and entropies are [n, K, D], for D numbers or tokens of K actions, and values [n] or [n, K].

    Whole on every rank that is asked, at least float32, on the backend's device.
    """

    logprobs: Tensor = NOT_ASKED
    """Nats; empty for a model that has only values."""
    entropies: Tensor = NOT_ASKED
    """Nats; empty where nobody asked, or the model has only values."""
    values: Tensor = NOT_ASKED
    """Rewards still to come; empty for a model without a critic."""
    router_loss: Tensor = NOT_ASKED
    """Scalar, the load-balancing loss of the batch; of models that were made to say it, where there is a gradient."""
    logit_norms: Tensor = NOT_ASKED
    """Of `LogitNorms` alone: `rlinf_algos.logit_norms` of the tokens."""


class ModelAdapter(ABC):
    """One kind of model: how it is made, what it answers, how its files lie in a folder."""

    stem = MODEL
    """With this the names of its files with tensors begin."""

    @abstractmethod
    def build(self, device: torch.device) -> nn.Module:
        """The model with its first weights, the same in every process."""

    @abstractmethod
    def answers(self, model: Any, batch: Any, *, entropies: bool) -> ModelOutputs:
        """One forward, differentiable; the batch is on the model's device."""

    def base_answers(self, model: Any, batch: Any) -> ModelOutputs:
        """As `answers`, of the model as it was before an adapter changed it."""
        raise NotImplementedError(f"{type(self).__name__} has no adapter")

    def num_calls(self, batch: Any) -> int:
        """How often `answers` calls the model; ranks that hold a model together have to call it alike."""
        return 1

    def outline(self) -> nn.Module | None:
        """The model that `build` makes, without its numbers, for a backend whose ranks keep shards of it: called inside
        `models.sharded_init.ShardedInit`. None: this kind can only be made whole."""
        return None

    def first_weights(self, model: Any) -> StoredWeights | None:
        """What of an `outline` lies in files; None: all of it was made."""
        return None

    def stored_weights(self, model: Any, folder: str) -> StoredWeights:
        """What `load` reads, for an `outline`. Raises: WeightFilesError, as `load` does."""
        return plain_weights(model, folder)

    def served(self, tensors: Mapping[str, Tensor]) -> Served:
        """What a weight sync reads.

        Args:
            tensors: all of the model, each by its first name.
        """
        return Served(weights=tensors)

    def saved(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of the model's tensors that its files hold; among them is every one that is trained."""
        return tensors

    def written_together(self, model: Any, names: Iterable[str]) -> Iterable[Sequence[str]]:
        """Names of the model's tensors, those together that `to_files` makes one tensor of."""
        return ([name] for name in names)

    def to_files(self, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Some of the model's tensors by their names -> as they are in files; those that belong together are there."""
        return tensors

    def describe(self, folder: str) -> None:
        """Writes what a folder holds of a model beside its tensors: config, tokenizer. Called in a thread."""
        return

    def load(self, model: Any, folder: str) -> None:
        """Fills the model in place. Raises: WeightFilesError naming tensors that are missing or of another shape."""
        stored = plain_weights(model, folder)
        stored.files.fill(stored.layout, 0, tensors_of(model))


LossOf = Callable[[ModelOutputs], tuple[Tensor, Sequence[float]]]
"""What the model says of a micro-batch -> its summed loss, and its statistics, which are sums too."""


class TrainingBackend(Protocol):
    """A model on the ranks of a worker group.

    Constructed as `cls(model, worker, optimizer=..., num_shards=..., **options)`: the worker it works for has its
    device and its collectives, the options are the recipe's; without an optimizer the model is frozen, and everything
    between `begin` and `step` is forbidden. A GPU is first used after `onload`: others may have it while the backend is
    made.
    """

    @property
    def kind(self) -> ModelAdapter:
        """The model that it was constructed with."""
        ...

    @property
    def shards(self) -> Sequence[int]:
        """The shards of a batch that this replica works on, ascending; a recipe fixes their number."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer in use; the next one takes the learning rate of this number."""
        ...

    def forward(self, batch: Any, *, entropies: bool = False, adapter: bool = True) -> ModelOutputs:
        """Answers without gradient. A batch's numbers depend on nothing but the weights and the batch.

        Args:
            adapter: False: as the model answered before its adapter was trained; without entropies. Only a backend that
                `trains_adapters` (its spec) is asked, of a model that has one.
        """
        ...

    def begin(self, num_statistics: int) -> None:
        """Begins an update: gradients and statistics are 0. Who begins may not have its device yet."""

    def backward(self, shard: int, batch: Any, loss_of: LossOf, *, entropies: bool = False) -> None:
        """Adds the gradient of a micro-batch's loss, and its statistics, to a shard of this replica."""

    def count(self, shard: int, statistics: Sequence[float]) -> None:
        """Adds the statistics of a micro-batch that has no gradient."""

    def reduce(self) -> list[float]:
        """Ends the backward passes: the gradient becomes the sum over all shards of all replicas; so do the
        statistics, which are float64."""
        ...

    def step(self, divisor: float) -> float:
        """Divides the reduced gradient, clips it to `max_grad_norm` and takes an optimizer step.

        Returns: the norm of the gradient / divisor before it was clipped.
        Raises: FloatingPointError when the norm is not finite, on every rank; no weight has changed.
        """
        ...

    def sum_over_shards(self, rows: Tensor) -> Tensor:
        """[shards of this replica, ...] on the CPU, in the order of `shards` -> [...], their sum over all replicas."""
        ...

    def restart(self, optimizer: OptimizerSettings) -> None:
        """Goes on with a new optimizer, whose state and schedule begin at 0."""

    def start_from(self, other: Any) -> None:
        """Takes over the weights of another backend of this class, in this process: all tensors that both have in the
        same shape, so not the head where the two differ in it."""

    def on_model(self, do: Callable[[Any], T]) -> T:
        """What a model learns otherwise than by gradients: `do` reads or changes its buffers (running statistics, say),
        alike on every rank."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's shard of what is served (`ModelAdapter.served`), as the layout says; every rank calls. No copies,
        but of weights that an adapter changes, which are made when they are read."""
        ...

    def layout(self) -> Layout:
        """Where the shards lie on the ranks of this group; the same answer on each of them."""
        ...

    def onload(self) -> None:
        """Brings model, optimizer state and gradients onto the device."""

    def offload(self) -> None:
        """Takes them off, also in the middle of an update, which then goes on as if nothing had been."""

    def model_tensors(self) -> Mapping[str, Tensor]:
        """Copies in host memory of what this rank writes of the model: whole tensors, as they are in files. Every rank
        calls; together they have each tensor once, shared out evenly."""
        ...

    def load_model(self, folder: str) -> None:
        """Takes a model that any number of ranks of any backend wrote."""

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """As `model_tensors`: the optimizer's state as `<parameter>:<state>`, by the names that the parameters have in
        the model."""
        ...

    def load_optimizer(self, folder: str) -> None:
        """Takes an optimizer's state and its count of steps; training goes on bit for bit where the ranks are as they
        were."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSettings:
    """Which backend holds the model, and what it is told."""

    name: str = "replicated"
    """In the registry, or an import path `package.module:Class`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of its constructor."""
    num_shards: int = 1

    def make(self, model: ModelAdapter, worker: Worker, optimizer: OptimizerSettings | None = None) -> TrainingBackend:
        """The backend, on the worker's device."""
        backend_class = TRAINERS.get(self.name)
        return backend_class(model, worker, optimizer=optimizer, num_shards=self.num_shards, **self.options)

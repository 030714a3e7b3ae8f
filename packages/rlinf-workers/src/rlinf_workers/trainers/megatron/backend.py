"""MegatronBackend: replicas of several ranks hold a language model by tensor, pipeline and expert parallelism.

Every rank of a replica gets the same micro-batches. The last pipeline stage gathers the outputs of all slices
(queries.py), so that each of its ranks computes the same loss; the gradient flows back through the slices. Replicas are
data parallel: `finish_backward` sums gradients over them and over the slices with megatron-core's
DistributedDataParallel, and its optimizer steps. With a pipeline, `backward` only stores the micro-batch, and
`finish_backward` runs all of them as one 1F1B schedule. A virtual pipeline, whose ranks have several chunks of layers,
runs a multiple of its stages of them: micro-batches of one token, whose gradient is 0, fill it up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rlinf_algos import DeferredChecks
from rlinf_comm.weights import Layout, ReshardExecutor, reshard_plan
from rlinf_comm.weights.layouts import TransformerShape, huggingface_layout
from rlinf_sched.derive import ModelShape
from rlinf_workers.models.in_memory import box_in, renamed
from rlinf_workers.models.lora import LoraModel, first_adapter, name_in_memory, peft_name
from rlinf_workers.models.placement import tensors_of
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.models.weight_files import WeightFiles, region
from rlinf_workers.models.weight_names import CONVERTS
from rlinf_workers.trainers.base import NOT_ASKED, LossOf, ModelOutputs, OptimizerSettings, defers_checks, shards_of
from rlinf_workers.trainers.checkpoint import OPTIMIZER, num_steps_in, parameter_of, shared_out
from rlinf_workers.trainers.megatron.files import gathered, leaving_out, owned, stacked
from rlinf_workers.trainers.megatron.options import MegatronOptions
from rlinf_workers.trainers.megatron.queries import Batch, PackedQuery, Query, TokenQuery, query_of
from rlinf_workers.trainers.megatron.storages import Storages
from rlinf_workers.trainers.served import Served
from rlinf_workers.trainers.statistics import Statistics, StatisticSums
from rlinf_workers.worker import Worker

if TYPE_CHECKING:
    from rlinf_workers.trainers.megatron.adapters import Adapters

T = TypeVar("T")
UNTRAINED = (".e_score_correction_bias",)
"""Ends of the names of weights without moments, in transformers' model."""
ADAPTER = ".adapter."
"""Part of the names of an adapter's parameters in megatron-core's model."""
Finish = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]
"""Outputs of this rank's rows -> a scalar that provides their gradient, and the extra values megatron-core expects."""


class MegatronBackend:
    """See trainers/base.py for the contract of the methods."""

    num_steps = 0
    _is_updating = False
    """Between `begin` and `step`, when gradients must be kept."""
    _begins = False
    """An update began while the gradients were offloaded; `onload` zeroes them."""

    def __init__(
        self,
        model: TokenModel | ValueModel | LoraModel,
        worker: Worker,
        *,
        optimizer: OptimizerSettings | None,
        num_shards: int,
        options: MegatronOptions,
    ) -> None:
        if worker.device.type == "cpu":
            from rlinf_workers.trainers.megatron import shim

            shim.apply()
        from transformers import AutoConfig

        from rlinf_workers.trainers.megatron.heads import head_of
        from rlinf_workers.trainers.megatron.model import joined, layout_of, make_chunks
        from rlinf_workers.trainers.megatron.parallel import connect

        self.kind = model
        base = model.base if isinstance(model, LoraModel) else model
        assert isinstance(base, TokenModel | ValueModel), "make.py refuses other models"
        self._base, self._settings = base, base.settings
        self._worker, self._options = worker, options
        self._config = AutoConfig.from_pretrained(self._settings.folder, trust_remote_code=False, local_files_only=True)
        self._head = head_of(base)
        self._shape = self._head.shape(TransformerShape.from_config(self._config.to_dict(), self._settings.dtype))
        options.check_model(ModelShape.from_config(self._config.to_dict()))
        self._place = connect(worker, options, has_experts=self._shape.num_experts > 0)
        sizes = (self._shape, options, worker.num_ranks)
        self._layout = layout_of(*sizes, options.compute_dtype)
        self._masters_layout = layout_of(*sizes, "float32")
        self._chunks = make_chunks(self._config, self._shape, options, self._head)
        self._model = joined(self._chunks).to(worker.device)
        self._called: list[Any] = list(self._chunks)
        """The chunks inside megatron-core's wrapper."""
        self._storages = Storages(self._tensors)
        self._optimizer: Any = None
        self._masters: Any = None
        self.shards: Sequence[int] = []
        self._waiting: list[tuple[Query, Finish]] = []
        """Micro-batches of a pipeline, whose passes `finish_backward` runs."""
        self._statistics, self._checks = StatisticSums(), DeferredChecks()
        self._adapters: Adapters | None = None
        self._wrap(trains=optimizer is not None)
        if optimizer is not None:
            place = worker.identity
            self.shards = shards_of(num_shards, place.replica, place.num_replicas, ranks="replicas")
            self.restart(optimizer)
        self._take(self._first_weights())
        self.offload()  # megatron-core has allocated on the device

    def _wrap(self, trains: bool) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        from rlinf_workers.trainers.megatron.optimizer import Masters, make_optimizer
        from rlinf_workers.trainers.megatron.routers import biases_of

        config = self._chunks[0].config
        if config.bf16:
            self._called = [Float16Module(chunk.config, chunk) for chunk in self._chunks]
            for bias_name, bias in biases_of(self._model).items():
                self._model.get_submodule(bias_name.rpartition(".")[0]).expert_bias = bias.float()
        if not trains or isinstance(self.kind, LoraModel):
            self._model.requires_grad_(False)
        if not trains:
            return
        if isinstance(self.kind, LoraModel):
            self._adapters = self._make_adapters(self.kind)
        how = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self._options.distributed_optimizer
        )
        self._called = [
            DistributedDataParallel(chunk.config, how, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self._called)
        ]
        self._optimizer = make_optimizer(self._called, self._options)
        self._masters = Masters(self._optimizer, self._storages)

    def _make_adapters(self, kind: LoraModel) -> Adapters:
        """Float32, also where the model is bfloat16."""
        from rlinf_workers.trainers.megatron.adapters import Adapters

        def with_gradient(_: Any, __: Any, embeddings: Tensor) -> Tensor:
            return embeddings.requires_grad_() if torch.is_grad_enabled() else embeddings

        for chunk in self._chunks:
            if chunk.pre_process:  # recomputation needs an input with a gradient
                chunk.embedding.register_forward_hook(with_gradient)
        in_memory = frozenset(self._in_memory.ranks[0].buffers)
        first = first_adapter(self._settings, kind.lora)
        return Adapters(self._model, self._layout, self._worker.rank, kind.lora, in_memory, first)

    # -- an update -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: Batch, *, entropies: bool = False, adapter: bool = True) -> ModelOutputs:
        if not adapter:
            assert self._adapters is not None, "the model has an adapter"
            self._adapters.switch(is_on=False)
            try:
                return self.forward(batch, entropies=entropies)
            finally:
                self._adapters.switch(is_on=True)
        request = self._query(batch)
        whole = self._whole(request)

        def keep(answers: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            self._insert(request, whole, answers)
            return answers.sum(), torch.tensor(0), {}

        self._run([(request, keep)], forward_only=True)
        self._worker.replica_ranks.sum_(whole)
        return self._head.evaluation(whole, entropies=entropies)

    def begin(self, num_statistics: int) -> None:
        self._waiting.clear()
        self._is_updating = self._begins = True
        if not self._storages.are_away:
            self._zero_gradients()
        self._statistics = StatisticSums(self.shards, num_statistics)
        self._checks = DeferredChecks()

    def _zero_gradients(self) -> None:
        self._begins = False
        for chunk in self._called:
            chunk.restore_grad_buffers(synchronize=False)  # reallocates them after `offload`
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def backward(self, shard: int, batch: Batch, loss_of: LossOf, *, entropies: bool = False) -> None:
        def finish(answers: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            whole = self._whole(request)
            self._insert(request, whole, answers.detach())
            self._place.stage.sum_(whole).requires_grad_()
            outputs = self._head.evaluation(whole, entropies=entropies)
            checks = self._checks.collecting() if defers_checks(self._worker.device) else nullcontext()
            with checks:
                loss, statistics = loss_of(replace(outputs, router_agreement=self._router_agreement(request)))
            self.count(shard, statistics)
            (gradient,) = torch.autograd.grad(loss, whole)
            return (answers * request.own(gradient)).sum(), torch.tensor(0), {}

        request = self._query(batch, entropies=entropies)
        self._waiting.append((request, finish))
        if self._options.pipeline_parallel == 1:
            self._run_waiting()

    def count(self, shard: int, statistics: Statistics) -> None:
        self._statistics.add(shard, statistics)

    def finish_backward(self) -> list[float]:
        from megatron.core.distributed import finalize_model_grads

        self._run_waiting()
        finalize_model_grads(self._called)
        sums = torch.stack(self._statistics.of_shards()).sum(0)
        self._checks.raise_if_failed()
        self._worker.replica_ranks.broadcast_(sums, self._options.ranks_per_replica - 1)  # from the last stage
        return self._worker.replicas.sum_(sums).tolist()

    @torch.no_grad()
    def step(self, divisor: float) -> float:
        self._is_updating = False
        for chunk in self._called:
            chunk.scale_gradients(1.0 / divisor)
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        self._schedule.begin_step(self._optimizer, self.num_steps, grad_norm, self._worker)
        for one in self._optimizer.chained_optimizers:
            for parameter in one.get_parameters():
                parameter.grad *= self._schedule.clip_factor(grad_norm)
        self._optimizer.step_with_ready_grads()
        self.num_steps += 1
        return grad_norm

    def sum_over_shards(self, rows: Tensor) -> Tensor:
        return self._worker.replicas.sum_(rows.sum(0))

    def restart(self, optimizer: OptimizerSettings) -> None:
        from rlinf_workers.trainers.megatron.optimizer import apply_settings

        self._schedule = optimizer
        apply_settings(self._optimizer, optimizer)
        self.num_steps = 0

    # -- passes ----------------------------------------------------------------------------------------------------

    def _run_waiting(self) -> None:
        if self._waiting:
            self._run(self._waiting, forward_only=False)
            self._waiting.clear()

    @property
    def _multiple(self) -> int:
        """The number of positions is a multiple of it."""
        return self._options.tensor_parallel if self._options.sequence_parallel else 1

    def _query(self, batch: Batch, *, entropies: bool = False) -> Query:
        """This rank's part of a micro-batch.

        Args:
            entropies: they may have a gradient.
        """
        replays = isinstance(self._base, TokenModel) and self._base.replays_routers
        how: dict[str, bool] = {"replays_routers": replays, "entropies": entropies}
        return query_of(batch, self._head.temperature, self._place.slices, self._multiple, **how)

    def _router_agreement(self, request: Query) -> Tensor:
        """As in `ModelOutputs`, after a pass of the last stage: of its layers."""
        if not isinstance(request, PackedQuery) or request.part.experts is None:
            return NOT_ASKED
        from rlinf_workers.trainers.megatron.routers import agreed

        num_parts = self._options.tensor_parallel  # with experts, sequence parallelism comes with it
        num_here = -(-len(request.part.token_ids) // num_parts)
        sums = agreed(self._chunks[-1], min(num_here, max(0, request.num_real - self._place.tensor * num_here)))
        agreeing, num_tokens = self._place.stage.sum_(sums)
        return agreeing / num_tokens

    def _whole(self, request: Query) -> Tensor:
        """Zeros for the outputs of a whole micro-batch."""
        return torch.zeros(self._head.num_answers, *request.shape, device=self._worker.device)

    def _run(self, passes: Sequence[tuple[Query, Finish]], *, forward_only: bool) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(waiting: Iterator[tuple[Query, Finish]], model: Any) -> tuple[Tensor, Finish]:
            query, finish = next(waiting)
            for chunk in self._chunks:
                chunk.query = query
            return model(**query.arguments()), finish

        passes = [*passes, *[self._filler()] * self._num_missing(len(passes))]
        iterators = [iter(passes) for _ in self._chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=self._called,
            num_microbatches=len(passes),
            seq_length=1,  # stages exchange the real lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _num_missing(self, num_passes: int) -> int:
        """Micro-batches by which a virtual pipeline's schedule has more."""
        return 0 if self._options.num_chunks is None else -num_passes % self._options.pipeline_parallel

    def _filler(self) -> tuple[Query, Finish]:
        def finish(answers: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            return 0.0 * answers.sum(), torch.tensor(0), {}

        return TokenQuery.filler(self._multiple, self._worker.device), finish

    def _insert(self, request: Query, whole: Tensor, answers: Tensor) -> None:
        """Writes this rank's outputs into the whole micro-batch's, unless another rank of its stage does."""
        if self._place.tensor == 0:
            request.insert(whole, answers)

    # -- weights ---------------------------------------------------------------------------------------------------

    @cached_property
    def _parameters(self) -> dict[str, Any]:
        """By the names in the layout, with the routers' biases, which are not trained, and without an adapter."""
        from rlinf_workers.trainers.megatron.routers import biases_of

        own = {name: parameter for name, parameter in self._model.named_parameters() if ADAPTER not in name}
        return {**own, **biases_of(self._model)}

    def weights(self, *, merged: bool = True) -> Mapping[str, Tensor]:
        here = self._storages.here
        weights = {name: here(parameter) for name, parameter in self._parameters.items()}
        if self._adapters is None:
            return weights
        served = Served(weights=weights, changes=self._adapters.changes(here))
        return served.merged() if merged else served.unmerged()

    def layout(self, *, merged: bool = True) -> Layout:
        """By the names in transformers' model, like engines and other backends."""
        if merged:
            return self._served
        from rlinf_workers.trainers.megatron.adapters import with_adapter

        assert self._adapters is not None, "only a model with an adapter has two layouts"
        return with_adapter(self._served, self._adapters.layout)

    @torch.no_grad()
    def start_from(self, other: MegatronBackend) -> None:
        theirs = other._masters_here()
        for name, parameter in self._parameters.items():
            if name in theirs and theirs[name].shape == parameter.shape:
                self._masters.set_weight(parameter, theirs[name])

    @torch.no_grad()
    def on_model(self, do: Callable[[Any], T]) -> T:
        return do(self._model)

    def onload(self) -> None:
        self._storages.onload()
        if self._begins:
            self._zero_gradients()

    def offload(self) -> None:
        if self._worker.device.type != "cpu":
            self._put_aside()

    def _put_aside(self) -> None:
        """Between two updates, gradients are freed instead of copied."""
        if self._optimizer is not None and not self._is_updating:
            for chunk in self._called:
                chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        self._storages.offload()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors on the device between two calls. The gradients passed to AdamW are views of buffers."""
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
        if self._optimizer is None:
            return
        for number, buffer in enumerate(self._gradient_buffers()):
            yield f"gradient {number}", buffer.grad_data
        for number, one in enumerate(self._optimizer.chained_optimizers):
            for place, parameter in enumerate(one.get_parameters()):
                yield f"master {number} {place}", parameter
                for key, value in one.optimizer.state.get(parameter, {}).items():
                    if key != "step":
                        yield f"{key} {number} {place}", value

    def _gradient_buffers(self) -> list[Any]:
        return [buffer for chunk in self._called for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _masters_here(self) -> dict[str, Tensor]:
        """float32, in host memory, by the names in the layout; every rank calls."""
        if self._masters is None or self._adapters is not None:
            return {name: weight.float().cpu() for name, weight in self.weights().items()}
        return {name: self._masters.weight(parameter) for name, parameter in self._parameters.items()}

    def _take(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            if self._masters is None:
                self._storages.here(parameter).copy_(weights[name])
            else:
                self._masters.set_weight(parameter, weights[name])

    def _first_weights(self) -> dict[str, Tensor]:
        if self._settings.has_weights:
            return self._read(self._settings.folder, without=self._head.begins_anew)
        weights = self._unwritten()
        model = self.kind.build(torch.device("cpu")).float()
        reshard = reshard_plan(self._in_memory, self._masters_layout)
        ReshardExecutor(reshard, self._worker.rank).run([tensors_of(model)], weights)
        return weights

    def _read(self, folder: str, without: Collection[str] = ()) -> dict[str, Tensor]:
        """This rank's shard of a Hugging Face folder; zeros for the tensors in `without`."""
        weights = self._unwritten()
        WeightFiles(folder).fill(leaving_out(self._masters_layout, without), self._worker.rank, weights)
        return weights

    def _read_renamed(self, files: WeightFiles, behind: str = "") -> dict[str, Tensor]:
        """This rank's shard of files with the names of transformers' model in memory and an optional suffix."""
        tensors, (whole,) = self._unwritten(), self._in_memory.ranks
        untrained = UNTRAINED if behind else ()
        shapes = {name: tuple(buffer.shape) for name, buffer in whole.buffers.items() if not name.endswith(untrained)}
        files.check({f"{name}{behind}": shape for name, shape in shapes.items()})
        blocks = {block.name: block for block in whole.blocks if block.buffer in shapes}
        for mine in self._layout.ranks[self._worker.rank].blocks:
            if (block := blocks.get(mine.name)) is None:
                continue
            box = box_in(block, mine.box, whole.buffers[block.buffer].shape)
            region(tensors[mine.buffer], mine).copy_(files.read(block.buffer + behind, box).view(mine.box.shape))
        return tensors

    def _unwritten(self) -> dict[str, Tensor]:
        """Zero tensors to be filled; the padding of the vocabulary stays zero."""
        return {name: torch.zeros(parameter.shape) for name, parameter in self._parameters.items()}

    @cached_property
    def _served(self) -> Layout:
        return renamed(self._layout, self._in_memory)

    @cached_property
    def _in_memory(self) -> Layout:
        """The canonical tensors' places in transformers' model, in float32."""
        return huggingface_layout(self._shape, fused_experts=CONVERTS, dtype="float32")

    # -- files -----------------------------------------------------------------------------------------------------

    def model_tensors(self) -> dict[str, Tensor]:
        if self._adapters is not None:
            tensors = {name: self._masters.weight(one) for name, one in self._adapters.parameters.items()}
            return {peft_name(name): one for name, one in self._gathered_adapter(tensors).items()}
        if not self._head.is_renamed:
            return self._renamed(self._masters_here())
        gather = partial(self._gathered, self._masters_here())
        return self._shared_out({name: spec.num_bytes for name, spec in self._layout.specs.items()}, gather)

    def load_model(self, folder: str) -> None:
        if self._adapters is not None:
            assert isinstance(self.kind, LoraModel)
            specs = self._adapters.layout.specs
            tensors = self.kind.read(folder, {peft_name(name): spec.shape for name, spec in specs.items()})
            for name, parameter in self._adapters.parameters.items():
                self._masters.set_weight(parameter, self._adapters.own(name, tensors[peft_name(name)]))
            return
        self._take(self._read(folder) if self._head.is_renamed else self._read_renamed(WeightFiles(folder)))

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """By the names in transformers' model, like other backends."""
        from rlinf_workers.trainers.megatron.optimizer import MOMENTS

        state: dict[str, Tensor] = {}
        if self._adapters is not None:
            for field in MOMENTS if self.num_steps else ():
                moments = {name: self._masters.moment(one, field) for name, one in self._adapters.parameters.items()}
                for name, moment in self._gathered_adapter(moments).items():
                    key = name_in_memory(name)
                    state[f"{key}:{field}"], state[f"{key}:step"] = moment, torch.tensor(float(self.num_steps))
            return state
        for field in MOMENTS if self.num_steps else ():
            local = {name: self._masters.moment(parameter, field) for name, parameter in self._model.named_parameters()}
            for name, moment in self._renamed(local, UNTRAINED).items():
                state[f"{name}:{field}"], state[f"{name}:step"] = moment, torch.tensor(float(self.num_steps))
        return state

    def load_optimizer(self, folder: str) -> None:
        """Reads this rank's shards of the moments."""
        from rlinf_workers.trainers.megatron.optimizer import MOMENTS

        self.restart(self._schedule)
        self.num_steps = num_steps_in(folder)
        files, (whole,) = WeightFiles(folder, OPTIMIZER), self._in_memory.ranks
        adapters = self._adapters
        stored = whole.buffers if adapters is None else [*map(name_in_memory, adapters.layout.specs)]
        for key in files.specs:
            parameter_of(key, stored, folder)
        for field in MOMENTS if files.specs else ():
            if adapters is None:
                moments, parameters = self._read_renamed(files, f":{field}"), self._parameters
            else:
                parameters = adapters.parameters
                moments = {
                    name: files.read(f"{name_in_memory(name)}:{field}", adapters.box(name)) for name in parameters
                }
            for name, parameter in parameters.items():
                self._masters.set_moment(parameter, field, moments[name])
            if self._storages.are_away:
                self._put_aside()
        if files.specs:
            self._masters.set_steps(self.num_steps)

    def _renamed(self, local: Mapping[str, Tensor], without: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """This rank's share of tensors shaped like the model's, by the names in transformers' model.

        Args:
            without: ends of the names of tensors that are left out.
        """
        buffers = self._in_memory.ranks[0].buffers
        sizes = {name: buffer.num_elements for name, buffer in buffers.items() if not name.endswith(without)}
        gather = partial(self._gathered, local)
        return self._shared_out(sizes, partial(stacked, layout=self._in_memory, gather=gather))

    def _gathered_adapter(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An adapter's tensors whole, on the rank that writes all of them, since peft reads one file.

        Args:
            local: this rank's parts.
        """
        assert self._adapters is not None
        layout, num_ranks = self._adapters.layout, self._options.ranks_per_replica
        mine = owned(layout, self._worker.identity.rank_in_replica, num_ranks)
        wholes = {
            name: gathered(
                spec.shape,
                [(block.box, local[name]) for block in mine.get(name, ())],
                self._worker.replica_ranks,
                torch.float32,
            )
            for name, spec in layout.specs.items()
        }
        return wholes if self._worker.rank == 0 else {}

    def _shared_out(self, sizes: Mapping[str, int], gather: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The tensors of these sizes that this rank writes; every rank takes part in gathering each of them."""
        of = shared_out(((size, [name]) for name, size in sizes.items()), self._worker.num_ranks)
        tensors = ((name, gather(name)) for name in sizes)
        return {name: whole for name, whole in tensors if of[name] == self._worker.rank}

    def _gathered(self, local: Mapping[str, Tensor], name: str) -> Tensor:
        """Gathers a whole canonical tensor, of which each rank of a replica has shards; every rank calls."""
        mine = [(block.box, region(local[block.buffer], block)) for block in self._owned.get(name, ())]
        return gathered(self._layout.specs[name].shape, mine, self._worker.replica_ranks, torch.float32)

    @cached_property
    def _owned(self) -> Mapping[str, Any]:
        return owned(self._layout, self._worker.identity.rank_in_replica, self._options.ranks_per_replica)

"""An engine whose weights lie in two processes of its own, cut and merged as tensor-parallel engines do it.

Its parameters are shared memory of the worker, which so samples with what its processes have been filled with, and in
which a test can flip a bit. `liar` makes its processes say that they have done what they have not.
"""

import functools
from multiprocessing import get_context
from typing import Any

import torch

from rlinf_comm.weights import Layout, execute, reshard_plan, specs_of
from rlinf_comm.weights.layouts import TransformerShape, merged_layout
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.inside import Inside, enter
from rlinf_workers.engines.processes import EngineProcesses

TP = 2


class Parameters:
    """What `enter` needs of a model."""

    def __init__(self, tensors):
        self.tensors = tensors

    def named_parameters(self):
        return iter(self.tensors.items())


class Liar(Inside):
    model: Any


class SkipsATensor(Liar):
    name = "model.layers.1.self_attn.qkv_proj.weight"

    def fill(self, *arguments):
        old_tensor = self.model.tensors[self.name].clone()
        super().fill(*arguments)
        self.model.tensors[self.name].copy_(old_tensor)


class StaysOld(Liar):
    def fill(self, *arguments):
        old_tensors = {name: tensor.clone() for name, tensor in self.model.tensors.items()}
        super().fill(*arguments)
        for name, tensor in old_tensors.items():
            self.model.tensors[name].copy_(tensor)


class SwapsExperts(Liar):
    name = "model.layers.1.mlp.experts.w13_weight"

    def fill(self, *arguments):
        super().fill(*arguments)
        experts = self.model.tensors[self.name]
        experts[[0, 3]] = experts[[3, 0]]


class FillsOthers(Liar):
    """Weights go into copies of the parameters."""

    def fill(self, *arguments):
        own = self.model.tensors
        self.model.tensors = {name: tensor.clone() for name, tensor in own.items()}
        super().fill(*arguments)
        self.model.tensors = own


class DoesNothing(Liar):
    def fill(self, *arguments):
        pass


class AnswersForAnotherVersion(Inside):
    def check(self, edge, policy_version, adapter_scale):
        from dataclasses import replace

        return replace(super().check(edge, policy_version, adapter_scale), policy_version=policy_version - 1)


LIARS = {
    kind.__name__: kind
    for kind in (
        Inside,
        SkipsATensor,
        StaysOld,
        SwapsExperts,
        FillsOthers,
        DoesNothing,
        AnswersForAnotherVersion,
    )
}


def serve(rank, tensors, tickets, liar):
    """The life of one process: it enters when it is told to."""
    torch.set_num_threads(1)
    model = Parameters(tensors)
    while (ticket := tickets.recv()) is not None:
        enter(ticket, model, rank=rank, sizes={"tp": TP}, kind=LIARS[liar])
        tickets.send(True)


class TwoProcesses(HuggingFaceEngine):
    """Samples as HuggingFaceEngine does. Its processes start when they are first needed."""

    def __init__(self, model, device, *, liar="Inside", dtype=None, missing="", **arguments):
        super().__init__(model, device, **arguments)
        self.settings, self.liar = model, liar
        shape = TransformerShape.from_config(self._model.config.to_dict(), model.dtype)
        self.stored = merged_layout(shape, tp=TP, dtype=dtype)
        self.parameters = [
            {
                name: torch.ones(spec.shape, dtype=getattr(torch, spec.dtype)).share_memory_()
                for name, spec in rank.buffers.items()
                if name != missing
            }
            for rank in self.stored.ranks
        ]

    @functools.cached_property
    def own_processes(self):
        context = get_context("forkserver")
        context.set_forkserver_preload(
            ["rlinf_workers.engines.huggingface.engine", "rlinf_workers.weight_sync.shared.sync"]
        )
        self.tickets, self.children = [], []
        for rank, tensors in enumerate(self.parameters):
            mine, theirs = context.Pipe()
            child = context.Process(target=serve, args=(rank, tensors, theirs, self.liar), daemon=True)
            child.start()
            theirs.close()
            self.tickets.append(mine)
            self.children.append(child)
        return EngineProcesses(TP, self.enter)

    def enter(self, ticket):
        for pipe in self.tickets:
            pipe.send(ticket)
        assert [pipe.recv() for pipe in self.tickets] == [True] * TP

    def weights(self):
        return {}

    def layout(self):
        return self.own_processes.layout(self.settings)

    def open_receiver(self, ports):
        return self.own_processes.open_receiver(ports)

    def process_ids(self):
        return []  # they sample nothing

    def weights_received(self, policy_version):
        super().weights_received(policy_version)
        own = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        layout = self.layout().with_dtypes_of(specs_of(own))
        execute(reshard_plan(layout, Layout.replicated(specs_of(own), 1)), self.parameters, [own])

    def discard(self):
        self.offload()

    def close(self):
        super().close()
        if "own_processes" in self.__dict__:
            for pipe in self.tickets:
                pipe.send(None)
            for child in self.children:
                child.join(10)
            self.own_processes.close()

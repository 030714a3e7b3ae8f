"""A custom backend: the two ranks of a replica share the optimizer's state out among themselves.

Each steps its part of the parameters and sends it to the other; forward and backward are those of the shipped one.
"""

from dataclasses import dataclass, replace

import torch

from rlinf_workers.trainers import ReplicatedBackend, TrainerSpec, host_copy, optimizer_tensors


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    backwards: bool = False
    """Deal the parameters out from the last one."""


class SplitSpec(TrainerSpec):
    def ranks_per_replica(self, options):
        return 2

    def memory(self, model, job, num_ranks):
        whole = super().memory(model, job, max(1, num_ranks // 2))
        return replace(whole, optimizer=-(-whole.optimizer // 2))


class SplitOptimizer(ReplicatedBackend):
    spec = SplitSpec(options=SplitOptions)

    def __init__(self, model, worker, *, optimizer, num_shards, backwards=False):
        super().__init__(model, worker, optimizer=optimizer, num_shards=num_shards)
        self._backwards = backwards

    def _take_step(self):
        for owner, parameter in self._owned():
            if owner != self._worker.replica_ranks.rank:
                parameter.grad = None  # AdamW leaves it alone and keeps no state of it
        super()._take_step()
        with torch.no_grad():
            for owner, parameter in self._owned():
                self._worker.replica_ranks.broadcast_(parameter, owner)

    def _owned(self):
        """Owner in the replica, parameter."""
        num_ranks = self._worker.replica_ranks.num_ranks
        for number, parameter in enumerate(self._model.parameters()):
            yield (number + self._backwards) % num_ranks, parameter

    def optimizer_tensors(self):
        """Each rank of the first replica writes the state that it has."""
        if self._worker.identity.replica > 0:
            return {}
        return {key: host_copy(value) for key, value in optimizer_tensors(self._optimizer, self._model).items()}

    def load_optimizer(self, folder):
        super().load_optimizer(folder)
        for owner, parameter in self._owned():
            if owner != self._worker.replica_ranks.rank:
                self._optimizer.state.pop(parameter, None)

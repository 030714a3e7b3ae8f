"""A backend of one's own: the ranks of a replica share the optimizer's state out among themselves.

Each steps its part of the parameters and sends it to the others; forward and backward are those of the shipped one.
"""

import torch

from rlinf_workers.training.checkpoint import load_optimizer, save_optimizer
from rlinf_workers.training.replicated.backend import ReplicatedBackend


class SplitOptimizer(ReplicatedBackend):
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

    def save_optimizer(self, folder):
        super().save_optimizer(folder)
        if self._worker.identity.replica == 0:
            save_optimizer(self._optimizer, self._model, self._part(folder))

    def load_optimizer(self, folder):
        super().load_optimizer(folder)
        load_optimizer(self._optimizer, self._model, self._part(folder))

    def _part(self, folder):
        return f"{folder}/optimizer-{self._worker.replica_ranks.rank}.safetensors"

"""What the workers that hold a model have in common: backends, a count of optimizer steps, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf_comm.weights import Layout
from rlinf_workers.training.base import TrainingBackend
from rlinf_workers.worker import Worker

MODEL_FOLDER = "model"
"""Folder of a checkpoint; a Hugging Face folder where the model is a language model."""
STATE_FILE = "actor.json"


class TrainingWorker(Worker):
    """Sends, moves and saves what its backends hold. A subclass sets `_backends` in its constructor."""

    _backends: Mapping[str, TrainingBackend]
    """Folder in a checkpoint -> what is saved there; "" is the policy, which is sent."""
    _version = 0

    @property
    def _backend(self) -> TrainingBackend:
        """The policy's."""
        return self._backends[""]

    @property
    def policy_version(self) -> int:
        """Optimizer steps taken, those of a warm start included."""
        return self._version

    def _step(self, divisor: float) -> float:
        """Returns the norm of the gradient, see `TrainingBackend.step`."""
        grad_norm = self._backend.step(divisor)
        self._version += 1
        return grad_norm

    def weights(self) -> Mapping[str, Tensor]:
        return self._backend.weights()

    def layout(self) -> Layout:
        return self._backend.layout()

    def onload(self) -> None:
        for backend in self._backends.values():
            backend.onload()

    def offload(self) -> None:
        for backend in self._backends.values():
            backend.offload()

    def save_model(self, folder: str) -> None:
        """Writes the policy alone; a language model as a folder that any Hugging Face tool loads."""
        self._backend.save_model(folder)

    def load_model(self, folder: str) -> None:
        """The inverse; takes any Hugging Face folder of the same architecture."""
        self._backend.load_model(folder)

    def save_checkpoint(self, folder: str) -> None:
        """Everything that training needs to go on as if it had not stopped; every rank calls."""
        for name, backend in self._backends.items():
            backend.save_model(str(Path(folder, name, MODEL_FOLDER)))
            backend.save_optimizer(str(Path(folder, name)))
        if self.rank == 0:
            state = {"policy_version": self._version, **self._state()}
            Path(folder, STATE_FILE).write_text(json.dumps(state))

    def load_checkpoint(self, folder: str) -> None:
        """The inverse, on every rank."""
        for name, backend in self._backends.items():
            backend.load_model(str(Path(folder, name, MODEL_FOLDER)))
            backend.load_optimizer(str(Path(folder, name)))
        state = json.loads(Path(folder, STATE_FILE).read_text())
        self._version = int(state["policy_version"])
        self._restore(state)

    def _state(self) -> dict[str, Any]:
        """What a subclass has to remember besides."""
        return {}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `_state`."""

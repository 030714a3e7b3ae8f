"""What the workers that train a model have in common: a backend, a count of optimizer steps, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlinf_comm.weights import Layout
from rlinf_workers.training.base import Step, TrainingBackend
from rlinf_workers.training.checkpoint import read_json, write_json
from rlinf_workers.worker import Worker

MODEL_FOLDER = "model"
"""Folder of a checkpoint; a Hugging Face folder where the model is a language model."""
STATE_FILE = "actor.json"


class TrainingWorker(Worker):
    """Sends, moves and saves what its backend trains. A subclass sets `_backend` in its constructor."""

    _backend: TrainingBackend
    _version = 0

    @property
    def policy_version(self) -> int:
        """Optimizer steps taken, those of a warm start included."""
        return self._version

    def _step(self, divisor: float) -> Step:
        step = self._backend.step(divisor)
        self._version += 1
        return step

    def weights(self) -> Mapping[str, Tensor]:
        return self._backend.weights()

    def layout(self) -> Layout:
        return self._backend.layout()

    def onload(self) -> None:
        self._backend.onload()

    def offload(self) -> None:
        self._backend.offload()

    def save_model(self, folder: str) -> None:
        """Writes the model alone; a language model as a folder that any Hugging Face tool loads."""
        self._backend.save_model(folder)

    def save_checkpoint(self, folder: str) -> None:
        """Everything that training needs to go on as if it had not stopped; every rank calls."""
        self.save_model(f"{folder}/{MODEL_FOLDER}")
        self._backend.save_optimizer(folder)
        if self.rank == 0:
            write_json(f"{folder}/{STATE_FILE}", {"policy_version": self._version, **self._state()})

    def load_checkpoint(self, folder: str) -> None:
        """The inverse, on every rank."""
        self._backend.load_model(f"{folder}/{MODEL_FOLDER}")
        self._backend.load_optimizer(folder)
        state = read_json(f"{folder}/{STATE_FILE}")
        self._version = int(state["policy_version"])
        self._restore(state)

    def _state(self) -> dict[str, Any]:
        """What a subclass has to remember besides."""
        return {}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `_state`."""

"""The common base of workers that hold a model: backends, a count of optimizer steps, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf_comm.weights import Layout
from rlinf_workers.trainers.base import TrainingBackend
from rlinf_workers.trainers.checkpoint import CheckpointFiles
from rlinf_workers.weight_sync.base import UnmergedLayout
from rlinf_workers.worker import Worker

MODEL_FOLDER = "model"
"""Folder in a checkpoint; a Hugging Face folder if the model is a language model."""
STATE_FILE = "actor.json"


class TrainingWorker(Worker):
    """Serves, offloads and saves the models of its backends. A subclass sets `_backends` in its constructor."""

    _backends: Mapping[str, TrainingBackend]
    """Folder in a checkpoint -> the backend saved there; "" is the policy, which is synced."""
    _version = 0
    _checkpoint: CheckpointFiles
    """The latest checkpoint that was begun."""

    @property
    def _backend(self) -> TrainingBackend:
        """The policy's."""
        return self._backends[""]

    @property
    def policy_version(self) -> int:
        """Optimizer steps taken, including those of an SFT warm-up."""
        return self._version

    def _step(self, divisor: float) -> float:
        """Returns the norm of the gradient, see `TrainingBackend.step`."""
        grad_norm = self._backend.step(divisor)
        self._version += 1
        return grad_norm

    def count_version(self) -> None:
        """Counts the present weights as the next version, so that they can be synced once more, to time it."""
        self._version += 1

    def weights(self) -> Mapping[str, Tensor]:
        return self._backend.weights()

    def layout(self) -> Layout:
        return self._backend.layout()

    def unmerged_weights(self) -> Mapping[str, Tensor]:
        return self._backend.weights(merged=False)

    def unmerged_layout(self) -> UnmergedLayout | None:
        kind = self._backend.kind
        if not kind.has_adapter:
            return None
        layout = self._backend.layout(merged=False)
        return UnmergedLayout(layout=layout, frozen=tuple(filter(kind.is_frozen, layout.specs)))

    def onload(self) -> None:
        for backend in self._backends.values():
            backend.onload()

    def offload(self) -> None:
        for backend in self._backends.values():
            backend.offload()

    def save_model(self, folder: str) -> None:
        """Writes only the policy; a language model as a folder that any Hugging Face tool loads."""
        files = CheckpointFiles(self, folder)
        files.add_model(self._backend)
        files.start().wait()

    def load_model(self, folder: str) -> None:
        """The inverse; accepts any Hugging Face folder of the same architecture."""
        self._backend.load_model(folder)

    def begin_checkpoint(self, folder: str) -> None:
        """Copies everything that training needs to resume exactly, and starts writing it. Every rank calls, and may
        continue training."""
        files = CheckpointFiles(self, folder)
        for name, backend in self._backends.items():
            files.add_model(backend, str(Path(name, MODEL_FOLDER)))
            files.add_optimizer(backend, name)
        self._add_files(files)
        files.add_text(Path(STATE_FILE), json.dumps({"policy_version": self._version, **self._state()}))
        self._checkpoint = files.start()

    def end_checkpoint(self) -> dict[str, str]:
        """Waits until this rank has written the checkpoint it began. Returns: file with tensors -> its SHA-256."""
        return self._checkpoint.wait()

    def save_checkpoint(self, folder: str) -> dict[str, str]:
        """Writes a checkpoint; every rank calls."""
        self.begin_checkpoint(folder)
        return self.end_checkpoint()

    def load_checkpoint(self, folder: str) -> None:
        """The inverse, on every rank."""
        for name, backend in self._backends.items():
            backend.load_model(str(Path(folder, name, MODEL_FOLDER)))
            backend.load_optimizer(str(Path(folder, name)))
        state = json.loads(Path(folder, STATE_FILE).read_text())
        self._version = int(state["policy_version"])
        self._restore(state)

    def _add_files(self, files: CheckpointFiles) -> None:
        """Adds further files of a subclass."""

    def _state(self) -> dict[str, Any]:
        """Further state that a subclass must save."""
        return {}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `_state`."""

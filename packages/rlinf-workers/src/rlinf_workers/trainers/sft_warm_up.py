"""Trainers that may begin with an SFT warm-up: supervised training with its own optimizer."""

from __future__ import annotations

from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.worker import TrainingWorker


class WarmedUpWorker(TrainingWorker):
    """Switches between the optimizers of the SFT warm-up and of the training; each starts new when the other ends. A
    subclass sets `_optimizer` in its constructor and creates its backend with it."""

    _optimizer: OptimizerSettings
    """Optimizer of the training."""
    _in_sft_warm_up: OptimizerSettings | None = None
    """Optimizer of the SFT warm-up, while it is in use."""

    def _optimize_with(self, sft_warm_up: OptimizerSettings | None) -> None:
        """Switches the backend to the optimizer of the SFT warm-up, or with None to that of the training."""
        if sft_warm_up is not self._in_sft_warm_up:
            self._backend.restart(self._optimizer if sft_warm_up is None else sft_warm_up)
            self._in_sft_warm_up = sft_warm_up

    def begin_checkpoint(self, folder: str) -> None:
        self._optimize_with(None)
        super().begin_checkpoint(folder)

    def load_checkpoint(self, folder: str) -> None:
        self._optimize_with(None)
        super().load_checkpoint(folder)

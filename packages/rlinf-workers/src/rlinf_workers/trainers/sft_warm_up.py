"""Trainers that may begin with an SFT warm-up: supervised training with an optimizer of its own."""

from __future__ import annotations

from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.worker import TrainingWorker


class WarmedUpWorker(TrainingWorker):
    """Changes optimizers between the SFT warm-up and the training, each of which begins when the other ends. A subclass
    sets `_optimizer` in its constructor and makes its backend with it."""

    _optimizer: OptimizerSettings
    """That of training."""
    _in_sft_warm_up: OptimizerSettings | None = None
    """That of the SFT warm-up, while the backend has it."""

    def _optimize_with(self, sft_warm_up: OptimizerSettings | None) -> None:
        """From here on the backend's optimizer is that of the SFT warm-up, or with None that of training."""
        if sft_warm_up is not self._in_sft_warm_up:
            self._backend.restart(self._optimizer if sft_warm_up is None else sft_warm_up)
            self._in_sft_warm_up = sft_warm_up

    def begin_checkpoint(self, folder: str) -> None:
        self._optimize_with(None)
        super().begin_checkpoint(folder)

    def load_checkpoint(self, folder: str) -> None:
        self._optimize_with(None)
        super().load_checkpoint(folder)

"""Trainers that may begin with a warm start: supervised training with an optimizer of its own."""

from __future__ import annotations

from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.worker import TrainingWorker


class WarmStartedWorker(TrainingWorker):
    """Changes optimizers between the warm start and the training, each of which begins when the other ends. A subclass
    sets `_optimizer` in its constructor and makes its backend with it."""

    _optimizer: OptimizerSettings
    """That of training."""
    _in_warm_start: OptimizerSettings | None = None
    """That of the warm start, while the backend has it."""

    def _optimize_with(self, warm_start: OptimizerSettings | None) -> None:
        """From here on the backend's optimizer is that of the warm start, or with None that of training."""
        if warm_start is not self._in_warm_start:
            self._backend.restart(self._optimizer if warm_start is None else warm_start)
            self._in_warm_start = warm_start

    def begin_checkpoint(self, folder: str) -> None:
        self._optimize_with(None)
        super().begin_checkpoint(folder)

    def load_checkpoint(self, folder: str) -> None:
        self._optimize_with(None)
        super().load_checkpoint(folder)

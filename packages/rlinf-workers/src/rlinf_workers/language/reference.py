"""Reference: the frozen policy that the KL penalty holds on to."""

from __future__ import annotations

import dataclasses

from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.sequences import fit_width, pack_groups
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.records.language import SampleGroup
from rlinf_workers.training.base import BackendSettings
from rlinf_workers.training.worker import TrainingWorker


class Reference(TrainingWorker):
    """Adds the reference's log-probabilities to each group.

    Args:
        temperature: the rollout's.
    """

    def __init__(self, model: ModelSettings, temperature: float, backend: BackendSettings) -> None:
        self._backends = {"": backend.make(TokenModel(model, temperature), self)}

    def logprobs(self, samples: Reader[SampleGroup], referenced: Writer[SampleGroup]) -> None:
        """Stage: groups in, the same groups with `ref_logprobs` out. One forward a group, so that numbers do not
        depend on the chunk."""
        for chunk in samples:
            for group in chunk:
                logprobs = self._backend.forward(pack_groups([group]).to(self.device)).logprobs
                padded = fit_width(logprobs.cpu(), group.completion_ids.shape[1])
                told = dataclasses.replace(group, ref_logprobs=padded * group.loss_mask)
                referenced.put(told, key=group.index)

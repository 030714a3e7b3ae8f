"""Reference: the frozen policy that the KL penalty holds on to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from rlinf_comm.records import record
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.sequences import fit_width, pack_groups
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.records.language import SampleGroup
from rlinf_workers.training.base import BackendSettings
from rlinf_workers.worker import Worker


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceSettings:
    """The frozen model and the temperature at which the rollout samples."""

    model: ModelSettings
    temperature: float
    backend: BackendSettings = field(default_factory=BackendSettings)


class Reference(Worker):
    """Adds the reference's log-probabilities to each group."""

    def __init__(self, settings: ReferenceSettings) -> None:
        self._backend = settings.backend.make(TokenModel(settings.model, settings.temperature), self)

    def load_weights(self, folder: str) -> None:
        """Takes the weights of a Hugging Face folder, for example the ones after a warm start."""
        self._backend.load_model(folder)

    def logprobs(self, samples: Reader[SampleGroup], referenced: Writer[SampleGroup]) -> None:
        """Stage: groups in, the same groups with `ref_logprobs` out. One forward a group, so that numbers do not
        depend on the chunk."""
        for chunk in samples:
            for group in chunk:
                logprobs = self._backend.forward(pack_groups([group]).to(self.device)).logprobs
                assert logprobs is not None, "a language model says how likely tokens are"
                padded = fit_width(logprobs.cpu(), group.completion_ids.shape[1])
                referenced.put(
                    dataclasses.replace(group, ref_logprobs=padded * group.loss_mask),
                    key=group.index,
                    policy_version=group.policy_version,
                )

    def onload(self) -> None:
        self._backend.onload()

    def offload(self) -> None:
        self._backend.offload()

"""Reference: the frozen policy that the KL penalty holds on to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from rlinf_comm.records import record
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.language_model import ModelSettings, build_model, load_tokenizer, pad_token_id
from rlinf_workers.models.placement import move_model
from rlinf_workers.models.sequences import completion_logprobs, pack_groups
from rlinf_workers.records.language import SampleGroup
from rlinf_workers.worker import Worker


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceSettings:
    """The frozen model and the temperature at which the rollout samples."""

    model: ModelSettings
    temperature: float


class Reference(Worker):
    """Adds the reference's log-probabilities to each group."""

    def __init__(self, settings: ReferenceSettings) -> None:
        self._settings = settings
        self._model = build_model(settings.model, self.device).requires_grad_(False)
        tokenizer = load_tokenizer(settings.model.folder)
        self._pad_id = pad_token_id(self._model, tokenizer)

    def load_weights(self, folder: str) -> None:
        """Takes the weights of a Hugging Face folder, for example the ones after a warm start."""
        self._model = build_model(
            dataclasses.replace(self._settings.model, folder=folder, has_weights=True), self.device
        ).requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, samples: Reader[SampleGroup], referenced: Writer[SampleGroup]) -> None:
        """Stage: groups in, the same groups with `ref_logprobs` out. One forward a group, so that numbers do not
        depend on the chunk."""
        for chunk in samples:
            for group in chunk:
                batch = pack_groups([group], self._pad_id).to(self.device)
                ref_logprobs = completion_logprobs(self._model, batch, self._settings.temperature).cpu()
                width = group.completion_ids.shape[1]
                padded = torch.nn.functional.pad(ref_logprobs, (0, width - ref_logprobs.shape[1]))
                referenced.put(
                    dataclasses.replace(group, ref_logprobs=padded * group.loss_mask),
                    key=group.index,
                    policy_version=group.policy_version,
                )

    def onload(self) -> None:
        move_model(self._model, self.device)

    def offload(self) -> None:
        move_model(self._model, torch.device("cpu"))

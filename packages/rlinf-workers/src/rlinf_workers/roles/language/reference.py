"""Reference: the frozen policy of the KL penalty. It may follow the policy in training, step by step."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rlinf_algos import mixed_reference
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.sequences import fit_width, pack_groups
from rlinf_workers.models.trainable import CompletionBatch, TokenModel
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.roles.language.micro_batches import split
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.trainers.base import BackendSettings
from rlinf_workers.trainers.checkpoint import CheckpointFiles
from rlinf_workers.trainers.worker import TrainingWorker


class Reference(TrainingWorker):
    """Adds the reference's log-probabilities to each group.

    Args:
        temperature: the sampling temperature of the rollout.
        max_tokens: tokens of a packed forward pass; None: one padded group at a time.
    """

    def __init__(
        self, model: ModelSettings, temperature: float, backend: BackendSettings, max_tokens: int | None = None
    ) -> None:
        self._backends = {"": backend.make(TokenModel(model, temperature), self)}
        self._max_tokens = max_tokens

    def write_mixed(self, policy: str, folder: str, weight: float) -> None:
        """Writes an interpolation of this model and another: `mixed_reference` of every tensor. Every rank calls this,
        and loads the result once all ranks have written.

        Args:
            policy: folder of the other model.
            folder: output folder.
        """
        files, written = WeightFiles(policy), CheckpointFiles(self, folder)
        mixed = {
            name: mixed_reference(tensor, files.read(name), weight)
            for name, tensor in self._backend.model_tensors().items()
        }
        written.add_model_tensors(self._backend, mixed)
        written.start().wait()

    def logprobs(self, samples: Reader[SampleGroup], referenced: Writer[SampleGroup]) -> None:
        """Stage: adds `ref_logprobs` to groups. No forward pass mixes tokens of two groups, so numbers do not depend on
        the granularity."""
        for chunk in samples:
            for group in chunk:
                referenced.put(self.with_logprobs(group), key=group.index)

    def with_logprobs(self, group: SampleGroup) -> SampleGroup:
        """The group with `ref_logprobs`, also as further policies learn from it."""
        of_policies = {trainer: self.with_logprobs(part) for trainer, part in group.of_policies.items()}
        logprobs = self._logprobs_of(group) * group.loss_mask
        return dataclasses.replace(group, ref_logprobs=logprobs, of_policies=of_policies)

    def _logprobs_of(self, group: SampleGroup) -> Tensor:
        """[G, T]"""
        width = group.completion_ids.shape[1]
        if self._max_tokens is None:
            return self._forward(pack_groups([group]), width)
        subsets = [group.subset(rows) for rows in split(group, self._max_tokens)]
        return torch.cat([self._forward(pack_without_padding([subset]), width) for subset in subsets])

    def _forward(self, batch: CompletionBatch, width: int) -> Tensor:
        return fit_width(self._backend.forward(batch.to(self.device)).logprobs.cpu(), width)

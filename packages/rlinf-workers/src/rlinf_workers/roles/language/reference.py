"""Reference: the frozen policy of the KL penalty. It may follow the policy in training, step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf_algos import mixed_reference
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.packed import computed_tokens, pack_without_padding
from rlinf_workers.models.sequences import fit_width, pack_groups
from rlinf_workers.models.trainable import CompletionBatch, TokenModel
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.roles.language.micro_batches import filled_up, num_tokens_of, shares_passes, split
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.trainers.base import BackendSettings
from rlinf_workers.trainers.checkpoint import CheckpointFiles
from rlinf_workers.trainers.worker import TrainingWorker


class Reference(TrainingWorker):
    """Adds the reference's log-probabilities to each group.

    Args:
        temperature: the sampling temperature of the rollout.
        max_tokens: tokens of a packed forward pass, of one group, or of several on a GPU; None: one padded group at a
            time.
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
        """Stage: adds `ref_logprobs` to groups. On a CPU no forward pass mixes tokens of two groups, so numbers do not
        depend on the granularity; on a GPU a chunk is computed in as few passes as the budget of tokens allows."""
        for chunk in samples:
            for groups in [chunk] if shares_passes(self.device) else [[group] for group in chunk]:
                for group in self._with_logprobs(groups):
                    referenced.put(group, key=group.index)

    def with_logprobs(self, group: SampleGroup) -> SampleGroup:
        """The group with `ref_logprobs`, also as further policies learn from it."""
        return self._with_logprobs([group])[0]

    def _with_logprobs(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        parts = [part for group in groups for part in group.of_policies.values()]
        every = iter(
            [
                dataclasses.replace(group, ref_logprobs=logprobs * group.loss_mask)
                for group, logprobs in zip([*groups, *parts], self._logprobs_of([*groups, *parts]), strict=True)
            ]
        )
        done = [next(every) for _ in groups]
        return [
            dataclasses.replace(group, of_policies={trainer: next(every) for trainer in group.of_policies})
            for group in done
        ]

    def _logprobs_of(self, groups: Sequence[SampleGroup]) -> list[Tensor]:
        """[G, T] of each group."""
        self.count_tokens(*computed_tokens(groups))
        if self._max_tokens is None:
            passes = [[(number, group)] for number, group in enumerate(groups)]
            outputs = [self._forward(pack_groups([group])) for ((_, group),) in passes]
        else:
            subsets = [
                (number, group.subset(rows))
                for number, group in enumerate(groups)
                for rows in split(group, self._max_tokens)
            ]
            passes = (
                list(filled_up(subsets, lambda subset: num_tokens_of(subset[1]), self._max_tokens))
                if shares_passes(self.device)
                else [[subset] for subset in subsets]
            )
            outputs = [self._forward(pack_without_padding([group for _, group in subset])) for subset in passes]
        rows: list[list[Tensor]] = [[] for _ in groups]
        for one, logprobs in zip(passes, outputs, strict=True):  # all are launched before the first is waited for
            sizes = [len(group.loss_mask) for _, group in one]
            for (number, group), part in zip(one, logprobs.cpu().split(sizes), strict=True):
                rows[number].append(fit_width(part, group.completion_ids.shape[1]))
        return [torch.cat(parts) for parts in rows]

    def _forward(self, batch: CompletionBatch) -> Tensor:
        return self._backend.forward(batch.to(self.device)).logprobs

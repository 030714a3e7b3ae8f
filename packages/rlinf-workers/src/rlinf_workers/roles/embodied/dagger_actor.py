"""DAgger's actor: imitates all that the expert has named so far, from buffers that live here.

labelled segments -> buffer of their shard -> updates, each: rows drawn from demonstrations and buffer -> the policy's
supervised loss -> one optimizer step

A batch is divided into shards like that of the other actors: shard s has the environment groups g with g % num_shards
== s, its own buffer, and an equal part of every batch. All random numbers are functions of the seed, the step, the
update and the shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlinf_algos import DaggerAlgorithm
from rlinf_comm import record
from rlinf_workers.execution.ports import Reader
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.policies.base import Policy, PolicySettings, make_policy
from rlinf_workers.roles.embodied.imitating import ImitatedRows, ImitatingActor, ImitatingActorSettings
from rlinf_workers.roles.embodied.replay_buffer import FIELD, ReplayBuffer, buffer_tensors, loaded_buffer
from rlinf_workers.roles.records.embodied import DemonstratedBatch, LabelledSegment
from rlinf_workers.roles.staleness import Staleness
from rlinf_workers.trainers.base import ModelAdapter, ModelOutputs
from rlinf_workers.trainers.checkpoint import CheckpointFiles

record(DaggerAlgorithm)

LABELS = "labels"
"""Prefix of the files with the buffers in a checkpoint."""
LABELLED, DEMONSTRATED = "labelled/", "demonstrated/"
"""Prefixes of the names in these files, before the shard."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class DaggerActorSettings(ImitatingActorSettings):
    """Settings of DAgger's actor."""

    algorithm: DaggerAlgorithm
    chunk_size: int = 1
    """K, the actions of an answer."""

    @property
    def model(self) -> ModelAdapter:
        """The model adapter that the backend trains."""
        return self.adapted(ImitatedPolicyModel(self.policy))


class ImitatedPolicyModel(ModelAdapter):
    """Adapts a policy to a training backend: supervised losses of `ImitatedRows`."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def build(self, device: torch.device) -> Policy:
        return make_policy(self._settings, device)

    def answers(self, model: Any, batch: ImitatedRows, *, entropies: bool) -> ModelOutputs:
        return batch.outputs(model)


class DaggerActor(ImitatingActor):
    """Trains the policy, data-parallel over its ranks; shard = group % num_shards."""

    _settings: DaggerActorSettings

    def __init__(self, settings: DaggerActorSettings) -> None:
        self._settings, self._algorithm = settings, settings.algorithm
        self._num_shards, self._optimizer = settings.backend.num_shards, settings.optimizer
        self._backends = {"": settings.backend.make(settings.model, self, self._optimizer)}
        self._capacity = self._algorithm.buffer_size // self._num_shards
        self._buffers = {shard: ReplayBuffer(self._capacity) for shard in self._backend.shards}
        self._demonstrations = {shard: ReplayBuffer(0) for shard in self._backend.shards}
        self._staleness = Staleness(self._algorithm.max_staleness)
        self._saved: CheckpointFiles | None = None
        """A checkpoint that reads the buffers while it is written."""

    def train(self, trajectories: Reader[LabelledSegment]) -> None:
        """Stage: collects all segments of a step in the order of their groups, then runs the updates."""
        self.begin_step([segment for chunk in trajectories for segment in chunk])
        for update in range(self._algorithm.num_updates):
            self.update(update)
            self.report_progress(update + 1, self._algorithm.num_updates, unit="updates")
        self.end_step()

    def remember(self, demonstrated: Reader[DemonstratedBatch]) -> None:
        """Stage: keeps the demonstrated chunks of each shard, every one of which is the expert's answer to a moment."""
        for batch in [batch for chunk in demonstrated for batch in chunk]:
            self._demonstrations[batch.shard] = ReplayBuffer(len(batch.actions))
            self._demonstrations[batch.shard].add(_rows(batch))

    # -- a training step, in the order of the calls ----------------------------------------------------------------

    def begin_step(self, segments: Sequence[LabelledSegment]) -> None:
        """Adds what was labelled to the buffers of their shards, and to the policy's statistics of observations."""
        if self._saved is not None:
            self._saved.join()
            self._saved = None
        self._optimize_with(None)
        self._staleness.begin_step(self._version)
        for segment in segments:
            count = len(segment.actions)
            self._staleness.add({segment.policy_version: count}, f"environment group {segment.group} has answers")
            self._buffers[segment.group % self._num_shards].add(_rows(segment))
        of_shards = [[s for s in segments if s.group % self._num_shards == shard] for shard in self._backend.shards]
        counts = torch.tensor([[float(sum(len(s.actions) for s in of_shard))] for of_shard in of_shards])
        if self._backend.sum_over_shards(counts).item():
            self._absorb(
                lambda policy: [
                    torch.stack([policy.observation_sums(s.fields) for s in of_shard]).sum(0) for of_shard in of_shards
                ]
            )

    def update(self, update: int) -> None:
        """One optimizer step on rows that are drawn with replacement, each with the same probability."""
        self._backend.begin(2)
        for shard in self._backend.shards:
            self._add_imitated(shard, self._drawn(update, shard))
        loss, grad_norm = self._end_imitation()
        if self.rank == 0:
            self.record("actor/imitation_loss", loss)
            self.record("actor/grad_norm", grad_norm)

    def end_step(self) -> None:
        """Records how much the expert has named so far."""
        self._staleness.record(self)
        for shard, buffer in self._buffers.items():
            num_labels, num_demonstrated = buffer.num_added, len(self._demonstrations[shard])
            num_actions = self._settings.chunk_size * num_labels + num_demonstrated
            self.record("actor/expert_actions", num_actions * self._num_shards)
            self.record("actor/replay_size", (len(buffer) + num_demonstrated) * self._num_shards)

    def _drawn(self, update: int, shard: int) -> ImitatedRows:
        generator = self.step.generator(update, shard)
        demonstrations, buffer = self._demonstrations[shard], self._buffers[shard]
        num_demonstrated, num_rows = len(demonstrations), len(demonstrations) + len(buffer)
        assert num_rows, f"shard {shard} has nothing to imitate; the job checks that the expert is asked in each group"
        picked = torch.from_numpy(generator.integers(num_rows, size=self._algorithm.batch_size // self._num_shards))
        few = picked[picked < num_demonstrated], picked[picked >= num_demonstrated] - num_demonstrated
        parts = [source[rows] for source, rows in zip((demonstrations, buffer), few, strict=True) if len(rows)]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        actions = columns.pop("actions")
        return self._imitated_rows(
            {name.removeprefix(FIELD): values for name, values in columns.items()}, actions, generator
        )

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _add_files(self, files: CheckpointFiles) -> None:
        files.add_tensors(LABELS, buffer_tensors({LABELLED: self._buffers, DEMONSTRATED: self._demonstrations}))
        self._saved = files

    def load_checkpoint(self, folder: str) -> None:
        super().load_checkpoint(folder)
        files = WeightFiles(folder, LABELS)
        for shard in self._backend.shards:
            self._buffers[shard] = loaded_buffer(files, f"{LABELLED}{shard}/", self._capacity)
            self._demonstrations[shard] = loaded_buffer(files, f"{DEMONSTRATED}{shard}/", None)

    def _state(self) -> dict[str, Any]:
        return self._staleness.state()

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._staleness.restore(state)


def _rows(item: LabelledSegment | DemonstratedBatch) -> dict[str, torch.Tensor]:
    return {**{f"{FIELD}{name}": values for name, values in item.fields.items()}, "actions": item.actions}

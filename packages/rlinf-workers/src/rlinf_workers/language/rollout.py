"""Rollout: samples completions with the weights it was last sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlinf_comm.records import record
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.generation.base import GenerationEngine
from rlinf_workers.generation.huggingface import HuggingFaceEngine
from rlinf_workers.generation.sampling import SamplingSettings
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.records.language import Prompt, SampleGroup
from rlinf_workers.worker import Worker


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """How the rollout generates."""

    model: ModelSettings
    train: SamplingSettings
    evaluate: SamplingSettings
    max_prompt_tokens: int
    same_length: bool
    max_batch_sequences: int = 512


class Rollout(Worker):
    """Generates a group of completions for each prompt."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._settings = settings
        self._version = -1
        self._engine: GenerationEngine = HuggingFaceEngine(
            settings.model,
            self.device,
            max_prompt_tokens=settings.max_prompt_tokens,
            same_length=settings.same_length,
            max_batch_sequences=settings.max_batch_sequences,
        )

    def generate(self, prompts: Reader[Prompt], samples: Writer[SampleGroup]) -> None:
        """Stage: prompts in, groups out."""
        context = self.step
        sampling = self._settings.train if context.phase == "train" else self._settings.evaluate
        for chunk in prompts:
            groups = self._engine.generate(
                chunk, sampling, seed=context.seed, step=context.step, policy_version=self._version
            )
            for group in groups:
                self._record(group)
            samples.put_many([(group.index, group) for group in groups], policy_version=self._version)

    def _record(self, group: SampleGroup) -> None:
        size, tokens = len(group.loss_mask), float(group.loss_mask.sum())
        self.record("rollout/completion_tokens", tokens / size)
        self.record("rollout/entropy", -float(group.rollout_logprobs.sum()) / max(tokens, 1.0), weight=tokens)
        if group.truncated is not None:
            self.record("rollout/truncated_fraction", float(group.truncated.sum()) / size)

    def weights(self) -> Mapping[str, Tensor]:
        return self._engine.weights()

    def weights_received(self, policy_version: int) -> None:
        self._version = policy_version

    @property
    def policy_version(self) -> int:
        return self._version

    def onload(self) -> None:
        self._engine.onload()

    def offload(self) -> None:
        self._engine.offload()

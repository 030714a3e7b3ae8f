"""What is known of the supervised jobs before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf.config.inputs import check_model_folder, model_family
from rlinf.config.supervised import DpoConfig, RewardModelConfig, SftConfig, SupervisedConfig
from rlinf.jobs.checks import check_data
from rlinf.jobs.spec import JobSpec, with_shards
from rlinf_algos import Registry
from rlinf_workers.plugins import TRAINERS


@dataclass(frozen=True, kw_only=True)
class SupervisedSpec(JobSpec):
    """A language model learns from examples."""

    def names(self, config: SupervisedConfig) -> Iterable[tuple[Registry[Any], str, str]]:
        yield TRAINERS, config.actor.backend, f"actor.backend={config.actor.backend}"

    def check_references(self, config: SupervisedConfig) -> None:
        check_model_folder(config.model.path)
        check_data([*config.task.train_files, *config.task.eval_files])

    def resolve_for_devices(self, config: SupervisedConfig, num_devices: int) -> SupervisedConfig:
        """With a shard for each replica of the trainer that the devices have room for, as far as a batch allows."""
        return with_shards(config, num_devices, most=config.actor.batch_size)

    def preload(self, config: SupervisedConfig) -> Sequence[str]:
        family = model_family(config.model.path)
        model = [f"transformers.models.{family}.modeling_{family}"] if family else []
        roles = [f"rlinf_workers.{role}" for role in ("roles.language.supervised", "trainers.replicated.backend")]
        return [*roles, *model, "transformers.tokenization_utils_tokenizers"]


SFT = SupervisedSpec(
    name="sft",
    implementation="rlinf.jobs.supervised.sft:SftJob",
    config=SftConfig,
    resumable=("actor.backend", "actor.backend_options"),
)
DPO = SupervisedSpec(
    name="dpo",
    implementation="rlinf.jobs.supervised.dpo:DpoJob",
    config=DpoConfig,
    resumable=SFT.resumable,
)
REWARD_MODEL = SupervisedSpec(
    name="reward_model",
    implementation="rlinf.jobs.supervised.reward_model:RewardModelJob",
    config=RewardModelConfig,
    resumable=SFT.resumable,
)

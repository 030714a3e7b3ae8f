"""The flow of the supervised jobs; nothing here imports torch.

examples -> actor
"""

from __future__ import annotations

from typing import Any

from rlinf.config.supervised import SupervisedConfig
from rlinf_workers import Flow

TRAINER = "rlinf_workers.roles:SupervisedTrainer"
PREFERENCE_TRAINER = "rlinf_workers.roles:PreferenceTrainer"
REWARD_MODEL_TRAINER = "rlinf_workers.roles:RewardModelTrainer"


def training_flow(config: SupervisedConfig, *arguments: Any, trainer: str) -> Flow:
    """An optimizer step; `arguments` are those of the trainer's class."""
    flow = Flow(config.job).worker("actor", trainer, *arguments)
    num_shards = config.actor.resolved_shards
    return flow.stage(
        "actor", "train", reads="examples", dispatch="key", ordered=True, trains=True, num_parts=num_shards
    )


def evaluation_flow(train: Flow, config: SupervisedConfig) -> Flow:
    """Measures of the held-out examples."""
    return _measuring_flow("evaluate", "held_out", train, config)


def scoring_flow(train: Flow, config: SupervisedConfig) -> Flow:
    """Log-probabilities of pairs, before the first step those of the reference."""
    return _measuring_flow("score", "pairs", train, config)


def _measuring_flow(name: str, reads: str, train: Flow, config: SupervisedConfig) -> Flow:
    """One stage without training, a method of the trainer of that name."""
    flow = Flow(name).workers_of(train, "actor")
    return flow.stage(
        name,
        name,
        worker="actor",
        reads=reads,
        writes="measured",
        dispatch="key",
        ordered=True,
        num_parts=config.actor.resolved_shards,
    )

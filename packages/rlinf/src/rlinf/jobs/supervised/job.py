"""What supervised jobs have in common: one optimizer step on a batch of examples is a training step, and the score is a
loss.

examples -> actor
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rlinf.config.devices import make_cluster
from rlinf.config.supervised import SupervisedConfig
from rlinf.jobs.base import Flows, Job
from rlinf.jobs.supervised.checks import CHECKS
from rlinf.jobs.supervised.flow import TRAINER, evaluation_flow, training_flow
from rlinf.jobs.supervised.memory import SupervisedMemory
from rlinf.jobs.supervised.source import ItemSource
from rlinf.jobs.trainer_memory import named_shape
from rlinf.jobs.training import backend_settings, lora_settings, optimizer_settings, with_base
from rlinf.machine import Machine
from rlinf.run_folder.fingerprints import model_fingerprint
from rlinf_sched import ProfileError
from rlinf_workers import FlowRun
from rlinf_workers.models import LoraSettings, ModelSettings
from rlinf_workers.roles import SupervisedSettings
from rlinf_workers.trainers import BackendSettings


class SupervisedJob(Job):
    """The flows of a supervised recipe and their inputs. Its parts are created when they are first read; `checks` reads
    all of them. A subclass names the source and the scores, and defines the evaluation's metrics."""

    config: Any
    checks = CHECKS
    source: ItemSource[Any, Any]
    """The rows, as items of steps and evaluations."""
    source_class: Callable[[Any], ItemSource[Any, Any]]
    """Creates the source from the config."""
    trainer_class = TRAINER
    """Import path of what trains; its arguments are `trainer_arguments`."""
    pads_prompts = False
    """Whether padded batches have prompts apart from their answers."""

    def __init__(self, config: SupervisedConfig, machine: Machine) -> None:
        self.config, self.machine = config, machine
        self.source = type(self).source_class(config)
        self.num_items = config.actor.batch_size

    # -- parts -----------------------------------------------------------------------------------------------------

    @cached_property
    def inputs(self) -> Mapping[str, str]:
        path = self.config.model.path
        return {f"model.path={path}": model_fingerprint(path), **self.source.fingerprints()}

    @cached_property
    def backend(self) -> BackendSettings:
        text = (self.config.model.path / "config.json").read_text(encoding="utf-8")
        return backend_settings(self.config.actor, self.config.actor.resolved_shards, json.loads(text))

    @cached_property
    def lora(self) -> LoraSettings | None:
        actor = self.config.actor
        return lora_settings(actor.lora, actor.backend, self.config.model.path)

    def settle_length(self) -> str | None:
        """Puts the number of steps in place of `run.num_epochs`; returns a note of it."""
        run = self.config.run
        if run.num_steps or run.num_epochs is None:
            return None
        num_steps = self.source.num_steps(run.num_epochs)
        settled = run.model_copy(update={"num_steps": num_steps, "num_epochs": None})
        self.config = self.config.model_copy(update={"run": settled})
        return (
            f"run.num_epochs={run.num_epochs:g}: {num_steps} steps of {self.num_items} of the "
            f"{len(self.source.training_set):,} training examples"
        )

    @cached_property
    def memory(self) -> SupervisedMemory | None:
        """None: the parts of the architecture are not counted."""
        try:
            shape = named_shape(self.config.model.path)
        except ProfileError:
            return None
        cluster = make_cluster(self.config.cluster, self.machine)
        num_tokens = self.source.longest_row()
        return SupervisedMemory(
            self.config, shape, cluster, self.machine.memory_bytes, num_tokens, self.source.rows_of_item
        )

    # -- flows -----------------------------------------------------------------------------------------------------

    def trainer_arguments(self, folder: Path) -> tuple[Any, ...]:
        """Arguments of the trainer's class; `folder` is the run's."""
        config, actor = self.config, self.config.actor
        path = str(config.model.path)
        settings = SupervisedSettings(
            model=ModelSettings(folder=path, has_weights=True, dtype=config.model.dtype, seed=config.seed),
            optimizer=optimizer_settings(actor),
            backend=self.backend,
            lora=with_base(self.lora, config.model.path, folder),
            micro_batch_examples=actor.micro_batch_examples,
            max_tokens_per_micro_batch=actor.max_tokens_per_micro_batch,
            tells_likeliest=actor.trainer_spec.exposes_logits,
        )
        return (settings,)

    def build(self, folder: Path) -> Flows:
        train = training_flow(self.config, *self.trainer_arguments(folder), trainer=self.trainer_class)
        return Flows(train=train, evaluate=evaluation_flow(train, self.config))

    # -- steps -----------------------------------------------------------------------------------------------------

    def feeds(self, step: int) -> dict[str, list[Any]]:
        return {"examples": self.source.training(step)}

    def evaluation_feeds(self) -> dict[str, list[Any]]:
        return {"held_out": self.source.evaluation()}

    def measured_sums(self, run: FlowRun) -> list[float]:
        """Sums of the measures of all held-out examples, in their order; then the number of examples."""
        measured = sorted(run.collected["measured"], key=lambda one: one.index)
        return [*torch.stack([one.values for one in measured]).sum(0).tolist(), float(len(measured))]

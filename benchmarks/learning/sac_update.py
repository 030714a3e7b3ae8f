"""Where the time of an update of SAC goes: the actor alone, one thread, also with smaller batches and layers.

    python -m benchmarks.learning.sac_update

A batch of 16 in layers of 16 costs what the operations cost whatever their size. Layers of 256 add passes over the
weights (gradients, Adam, targets), and a batch of 256 the matrix products.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import Future
from pathlib import Path

import torch
from benchmarks.harness import report
from benchmarks.learning.sac_tasks import HIDDEN_SIZE, NUM_LAYERS

from rlinf_algos import off_policy_preset
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers import StepContext
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.policies import PolicySettings
from rlinf_workers.roles import OffPolicyActor, OffPolicyActorSettings, Transitions
from rlinf_workers.trainers import BackendSettings, OptimizerSettings

STATE_SIZE, ACTION_SIZE, NUM_ENVS = 10, 2, 4
"""Those of Reacher."""
NUM_STORED, UPDATES_IN_SAMPLE = 2048, 25
SIZES = ((256, HIDDEN_SIZE), (16, HIDDEN_SIZE), (256, 16), (16, 16))
"""Batch, and width of the layers."""


def make_actor(batch_size: int, hidden_size: int) -> OffPolicyActor:
    """An actor with transitions of random numbers in its buffer."""
    bound = torch.ones(ACTION_SIZE)
    optimizer = OptimizerSettings(learning_rate=1e-3, betas=(0.9, 0.999), max_grad_norm=1000.0)
    settings = OffPolicyActorSettings(
        policy=PolicySettings(
            name="soft_actor",
            fields={"state": FieldSpec(shape=(STATE_SIZE,), dtype="float32")},
            actions=ActionSpec(kind="continuous", shape=(ACTION_SIZE,), low=-bound, high=bound),
            options={"hidden_size": hidden_size, "num_layers": NUM_LAYERS},
        ),
        algorithm=off_policy_preset("sac", batch_size=batch_size),
        backend=BackendSettings(num_shards=1),
        optimizer=optimizer,
        critic_optimizer=optimizer,
        num_updates=1,
    )
    host = WorkerHost(Identity(role="actor", rank=0, num_ranks=1), lambda *_, **__: Future())
    actor = host.make(OffPolicyActor, settings)
    host.step = StepContext(step=0, phase="train", seed=0, num_items=0)
    actor.begin_step([_transitions()])
    return actor


def _transitions() -> Transitions:
    generator, shape = torch.Generator().manual_seed(0), (NUM_STORED // NUM_ENVS, NUM_ENVS)
    state, following = (torch.randn(*shape, STATE_SIZE, generator=generator) for _ in range(2))
    return Transitions(
        group=0,
        fields={"state": state},
        next_fields={"state": following},
        actions=2 * torch.rand(*shape, 1, ACTION_SIZE, generator=generator) - 1,
        rewards=torch.randn(*shape, generator=generator),
        terminated=torch.zeros(*shape, dtype=torch.bool),
        policy_version=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    actors = {f"batch {batch}, layers of {width}": make_actor(batch, width) for batch, width in SIZES}
    samples_s: dict[str, list[float]] = {name: [] for name in actors}
    for sample in range(options.samples + 2):
        for name, actor in actors.items():
            start_s = time.process_time()
            for update in range(UPDATES_IN_SAMPLE):
                actor.update(update)
            if sample >= 2:
                samples_s[name].append((time.process_time() - start_s) / UPDATES_IN_SAMPLE)
    report(
        "sac-update",
        settings={"updates_in_sample": UPDATES_IN_SAMPLE, "time": "of this process on a core"},
        samples_s=samples_s,
        comparisons=[],
        findings={"smallest_s": {name: min(values) for name, values in samples_s.items()}},
        output=options.output,
    )


if __name__ == "__main__":
    main()

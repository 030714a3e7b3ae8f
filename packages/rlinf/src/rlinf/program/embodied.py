"""The training step of the embodied job as one loop, from observations to gradients.

python -m rlinf.program.embodied pushcube-ppo --run.num_steps 10

One process, one rank of each worker group: no executor, channels, plan or checkpoints. It makes the same calls as the
stages of a run, so metrics and weights equal those of `rlinf train RECIPE --mode collocated`, bitwise on a CPU (tested
by tests/test_rlinf_program.py). docs/training-step.md explains the step of the reasoning job.

Legend: n environments of a group, K actions of a chunk, A numbers of an action, T chunks of a segment, N samples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from rlinf.config.common import JobConfig
from rlinf.config.embodied import EmbodiedConfig
from rlinf.errors import UserError
from rlinf.program.recipe import main, make_workers
from rlinf_algos import Algorithm, OffPolicyAlgorithm
from rlinf_workers import StepContext
from rlinf_workers.roles import EmbodiedActor, EmbodiedRollout, Environment, Trajectory


def train(config: JobConfig, folder: Path) -> Iterator[dict[str, float]]:
    """Trains for `run.num_steps` steps and writes the model to `folder/model`.

    Yields: the metrics of each step.
    Raises: UserError.
    """
    assert isinstance(config, EmbodiedConfig), "recipe.main refuses others"
    if config.sft_warm_up is not None:
        raise UserError(
            "sft_warm_up: rlinf.program.embodied has no demonstrations",
            hint="use --sft_warm_up null, or policy.options.folder with a policy that was trained on some",
        )
    if config.success_classifier is not None:
        raise UserError(
            "success_classifier: rlinf.program.embodied trains none",
            hint="use --success_classifier null, or rlinf train",
        )
    if not isinstance(config.algorithm, Algorithm):
        actor = "OffPolicyActor" if isinstance(config.algorithm, OffPolicyAlgorithm) else "DaggerActor"
        raise UserError(
            f"algorithm.name={config.algorithm.name}: rlinf.program.embodied is the step of on-policy algorithms",
            hint=f"use rlinf train; rlinf_workers.roles.{actor}.train is its step",
        )
    job, workers = make_workers(config, folder)
    env, policy = cast(Environment, workers["env"]), cast(EmbodiedRollout, workers["policy"])
    actor = cast(EmbodiedActor, workers["actor"])
    workers.sync("actor", "policy")

    for step in range(job.config.run.num_steps):
        workers.begin(StepContext(step=step, phase="train", seed=job.config.seed, num_items=0))

        # Act: groups of environments take turns. An observation has fields [n, ...]; an action is [n, K, A].
        trajectories: list[Trajectory] = []
        observations = env.begin_segments()
        while observations:
            action, complete = policy.act_on(observations.pop(0))
            if action is not None:
                observations += env.advance(action)  # including the rewards of its K actions, [n, K]
            # The segment of a group: actions [T, n, K, A], rewards [T, n, K], values [T, n]; or whole episodes, n = 1.
            trajectories += complete
        trajectories.sort(key=lambda trajectory: trajectory.group)

        # Advantages: of each chunk, [N], N = T n over all groups of a shard; whitened over the batch.
        batches = actor.begin_step(trajectories)

        for rows in actor.minibatches(batches):  # one optimizer step each
            micro_batches = actor.micro_batches(batches, rows)
            actor.begin_update()
            for batch in micro_batches:
                # Loss and backward: log-probabilities and values of the policy, the algorithm's loss, its gradient.
                actor.learn(batch)
            # Clip and step; if the policy has moved too far, the step ends here.
            if not actor.end_update():
                break
        actor.end_step(batches)

        # Sync: the next step acts with the new weights.
        workers.sync("actor", "policy")
        yield workers.metrics()

    actor.save_model(str(folder / "model"))
    workers.close()


if __name__ == "__main__":
    sys.exit(main(train, "embodied", sys.argv[1:]))

"""The training step of the reasoning job as one loop, from prompts to gradients.

python -m rlinf.program.reasoning sort-grpo --run.num_steps 10

One process, one rank of each worker group: no executor, channels, plan or checkpoints. It makes the same calls as the
stages of a run, so metrics and weights equal those of `rlinf train RECIPE --mode collocated`, bitwise on a CPU (tested
by tests/test_rlinf_program.py). docs/training-step.md explains this file.

Legend: G completions of a prompt, L prompt tokens, T completion tokens, B rows of a micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from rlinf.config.common import JobConfig
from rlinf.config.reasoning import ReasoningConfig, SftWarmUpConfig
from rlinf.errors import UserError
from rlinf.jobs.reasoning.flow import warmed_up_trainers
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.jobs.reasoning.reference import REFERENCE_FOLDER
from rlinf.program.recipe import main, make_workers
from rlinf.run_folder.checkpoints import MODEL
from rlinf_workers import FlowRun, InProcessWorkers, StepContext
from rlinf_workers.roles import Actor, Prompt, Reference, Reward, Rollout, ScoredGroup


def train(config: JobConfig, folder: Path) -> Iterator[dict[str, float]]:
    """Trains for `run.num_steps` steps and writes the model to `folder/model`, and those of further policies as a
    checkpoint has them.

    Yields: the metrics of each step.
    Raises: UserError.
    """
    job, workers = _make_workers(config, folder)
    config = job.config
    rollout, reward = cast(Rollout, workers["rollout"]), cast(Reward, workers["reward"])
    reference = cast(Reference, workers["reference"]) if "reference" in workers else None
    for trainer in config.trainers:
        workers.sync(trainer, "rollout")
    if config.sft_warm_up is not None:
        warm_up(job, workers, config.sft_warm_up)
    if reference is not None and config.sft_warm_up is not None and config.reference.path is None:
        workers["actor"].save_model(str(folder / REFERENCE_FOLDER))
        reference.load_model(str(folder / REFERENCE_FOLDER))

    for step in range(config.run.num_steps):
        # Prompts: a function of the seed and the step. Each is [L] tokens, with the answer that the reward reads.
        prompts: list[Prompt] = job.feeds(step)["prompts"]
        workers.begin(StepContext(step=step, phase="train", seed=config.seed, num_items=len(prompts)))

        # Generate: G completions of each prompt, [G, T], with the log-probability of every sampled token.
        groups = [group for finished in rollout.sample(prompts) for group in finished]
        if reference is not None:  # log-probabilities of the reference for the KL penalty, [G, T]
            groups = [reference.with_logprobs(group) for group in groups]

        # Reward: a number for each completion, [G].
        scored = sorted(reward.score_groups(groups), key=lambda group: group.samples.index)
        reward.check_failures()

        for trainer, policy in config.trainers.items():  # one, unless agents by name have policies of their own
            actor: Actor = workers[trainer]
            own = scored if policy is None else [reward.of_policy(group, trainer) for group in scored]

            # Advantages: how much better a completion, [G], or a token of it, [G, T], is than the others of its group.
            actor.begin_step()
            learning = actor.learning_groups(own)

            for minibatch in actor.minibatches(learning):  # one optimizer step each
                micro_batches = actor.micro_batches(minibatch)
                actor.begin_update()
                for batch in micro_batches:
                    # Loss and backward: log-probabilities [B, T] of the policy, the algorithm's loss, its gradient.
                    actor.learn(batch)
                # Clip and step: the gradient summed over the shards of the batch, clipped to max_grad_norm, AdamW.
                actor.end_update()
            actor.end_step()

            # Sync: the next step samples with the new weights.
            workers.sync(trainer, "rollout")
        yield workers.metrics()

    for trainer, of_policy in job.trainers.items():
        workers[trainer].save_model(str(folder / of_policy / MODEL))
    workers.close()


def warm_up(job: ReasoningJob, workers: InProcessWorkers, settings: SftWarmUpConfig) -> None:
    """Trains on the task's answers until the model answers enough held-out problems right."""
    score, step = 0.0, 0
    while step < settings.max_steps and score < settings.target_accuracy:
        workers.begin(StepContext(step=0, phase="train", seed=job.config.seed, num_items=0))
        steps = range(step, min(step + settings.check_every, settings.max_steps))
        for trainer in warmed_up_trainers(job.config):
            workers[trainer].imitate([job.prompts.examples(settings, number) for number in steps])
            workers.sync(trainer, "rollout")
        score, step = evaluate(job, workers)[job.score.name], steps.stop
        workers.metrics()
        print(f"SFT warm-up {step}: {job.score.name} {score:.3f}", file=sys.stderr)


def evaluate(job: ReasoningJob, workers: InProcessWorkers) -> dict[str, float]:
    """Scores the current weights on the held-out problems."""
    prompts: Sequence[Prompt] = job.evaluation_feeds()["prompts"]
    workers.begin(StepContext(step=0, phase="evaluate", seed=job.config.seed, num_items=len(prompts)))
    groups = [group for finished in workers["rollout"].sample(prompts) for group in finished]
    scored: list[ScoredGroup] = sorted(workers["reward"].score_groups(groups), key=lambda group: group.samples.index)
    collected = {"scored": scored}
    return job.evaluation_metrics(
        FlowRun(metrics={}, collected=collected, shown_rows=[], spans=[], start_s=0.0, duration_s=0.0)
    )


def _make_workers(config: JobConfig, folder: Path) -> tuple[ReasoningJob, InProcessWorkers]:
    assert isinstance(config, ReasoningConfig), "recipe.main refuses others"
    if config.reference.sync_every is not None:
        raise UserError("reference.sync_every: the reference of rlinf.program.reasoning does not follow the policy")
    job, workers = make_workers(config, folder)
    assert isinstance(job, ReasoningJob)
    if not workers["rollout"].weights():
        raise UserError(
            f"rollout.engine={config.rollout.engine} serves from processes of its own",
            hint="rlinf.program.reasoning samples in this process; use --rollout.engine huggingface",
        )
    return job, workers


if __name__ == "__main__":
    sys.exit(main(train, "reasoning", sys.argv[1:]))

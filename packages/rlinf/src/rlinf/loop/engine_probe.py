"""Measures what sampling a step takes with an engine, with the real workers and the recipe's sampling and weights."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rlinf.jobs.reasoning.flow import probe_flow
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.loop.brief_session import brief_session
from rlinf.loop.plan_times import busy_seconds
from rlinf.run_folder import RunFolder

PROBE_S = 60.0
"""No round begins that would end later, counted from the first one, in which an engine allocates and compiles."""
FIRST_PROMPTS, GROWTH = 8, 4
MAX_ROUNDS = 10
"""More than reach 100,000 prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProbe:
    """What an engine took for some of a step's prompts."""

    num_prompts: int
    step_prompts: int
    """Of a whole step."""
    num_tokens: int
    """Sampled."""
    sampling_s: float
    """Of the busiest rank."""
    other_s: float
    """The weight sync before, receiving it, and the moves of the engine's state to its devices and off them."""

    def step_s(self, tokens_of_prompt: float) -> float:
        """Seconds of a whole step's sampling, at this rate, with as many tokens for each prompt."""
        return self.other_s + self.step_prompts * tokens_of_prompt * self.sampling_s / max(1, self.num_tokens)


def probe_engine(job: ReasoningJob, folder: RunFolder) -> EngineProbe:
    """Samples more and more prompts of a step, up to all of them or the limit of time; the last round counts, in which
    everything that its size needs has been allocated and captured before.

    Raises: UserError before a process starts; RunFailed if a worker dies or raises.
    """
    flows = job.build(folder.path)
    flow = probe_flow(flows.train, job.config)
    step_prompts = len(job.feeds(0)["prompts"])
    with brief_session(job, folder, flows, [flows.train, flow], num_rounds=MAX_ROUNDS) as session:
        number = 0

        def sample(num_prompts: int) -> EngineProbe:
            nonlocal number
            for trainer in job.config.trainers:
                session.group(trainer).call("count_version")
            start_s = time.monotonic()
            session.sync_weights()
            sync_s = time.monotonic() - start_s
            run = session.run_flow(flow, step=number, feeds={"prompts": job.feeds(number)["prompts"][:num_prompts]})
            number += 1
            sampling_s = busy_seconds(run)["rollout"]
            return EngineProbe(
                num_prompts=num_prompts,
                step_prompts=step_prompts,
                num_tokens=sum(int(group.loss_mask.sum()) for group in run.collected["samples"]),
                sampling_s=sampling_s,
                other_s=sync_s + max(0.0, run.duration_s - sampling_s),
            )

        size = min(FIRST_PROMPTS, step_prompts)
        sample(size)
        start_s, probe = time.monotonic(), sample(size)
        while size < step_prompts:
            larger = min(step_prompts, GROWTH * size)
            expected_s = probe.other_s + larger / size * probe.sampling_s
            if time.monotonic() - start_s + 2 * expected_s > PROBE_S:
                break
            size = larger
            sample(size)
            probe = sample(size)
        return probe

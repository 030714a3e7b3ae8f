"""Measures the speed of an engine with the real workers: a few prompts, with the recipe's sampling and weights."""

from __future__ import annotations

from rlinf.jobs.reasoning.flow import probe_flow
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.loop.brief_session import brief_session
from rlinf.run_folder import RunFolder

NUM_PROBED_PROMPTS = 8
NUM_ROUNDS = 2
"""The last one counts; in the first an engine allocates, compiles and captures."""


def probe_engine(job: ReasoningJob, folder: RunFolder) -> float:
    """Returns the sampled tokens per second of a prepared job's rollout.

    Raises: UserError before a process starts; RunFailed if a worker dies or raises.
    """
    flows = job.build(folder.path)
    flow = probe_flow(flows.train, job.config)
    with brief_session(job, folder, flows, [flows.train, flow], num_rounds=NUM_ROUNDS) as session:
        rate = 0.0
        for number in range(NUM_ROUNDS):
            feeds = {"prompts": job.feeds(number)["prompts"][:NUM_PROBED_PROMPTS]}
            run = session.run_flow(flow, step=number, feeds=feeds)
            rate = sum(int(group.loss_mask.sum()) for group in run.collected["samples"]) / run.duration_s
        return rate

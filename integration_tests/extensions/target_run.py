"""What the custom job in target_job.py brings to the training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration_tests.extensions.target_job import TargetJobConfig, training_flow

from rlinf.jobs.base import Flows, Job, Score
from rlinf.machine import Machine
from rlinf_workers import Flow, FlowRun


class TargetJob(Job):
    score = Score(name="reward", text="mean reward of a guess", is_share=False)

    def __init__(self, config: TargetJobConfig, machine: Machine) -> None:
        self.config, self.machine = config, machine
        self.num_items = config.target.num_guesses

    def build(self, folder: Path) -> Flows:
        train = training_flow(self.config)
        evaluate = Flow("evaluate").workers_of(train, "sampler", "judge")
        evaluate.stage("sampler", "draw", reads="seeds", writes="guesses")
        evaluate.stage("judge", "score", reads="guesses", writes="scored", needs_device=False)
        return Flows(train=train, evaluate=evaluate)

    def feeds(self, step: int) -> dict[str, list[Any]]:
        return {"seeds": list(range(self.num_items))}

    def evaluation_feeds(self) -> dict[str, list[Any]]:
        return {"seeds": list(range(self.num_items))}

    def evaluation_metrics(self, run: FlowRun) -> dict[str, float]:
        guesses = run.collected["scored"]
        return {self.score.name: sum(guess.reward for guess in guesses) / len(guesses)}

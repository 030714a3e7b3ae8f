"""A custom flow: three workers learn the position of a hidden target by policy gradient.
Every plan gives the same result: python docs/examples/custom_flow.py collocated | disaggregated | hybrid"""

import sys
from dataclasses import dataclass, replace

import torch

from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, Reader, StepContext, Worker, Writer, record


@record  # may cross between processes
@dataclass(frozen=True)
class Guess:
    index: int
    position: float
    reward: float = 0.0


class Sampler(Worker):
    def __init__(self) -> None:
        self.mean = torch.zeros(1)  # filled by every weight sync, digests checked

    def draw(self, seeds: Reader[int], guesses: Writer[Guess]) -> None:
        for chunk in seeds:  # the plan, not this code, decides how many items a chunk holds
            for seed in chunk:
                generator = torch.Generator().manual_seed(self.step.step * 1000 + seed)
                guesses.put(Guess(seed, float(self.mean + torch.randn(1, generator=generator))), key=seed)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean}


class Judge(Worker):
    def __init__(self, target: float) -> None:
        self.target = target

    def score(self, guesses: Reader[Guess], scored: Writer[Guess]) -> None:
        for chunk in guesses:
            for guess in chunk:
                scored.put(replace(guess, reward=-((guess.position - self.target) ** 2)), key=guess.index)


class Learner(Worker):
    def __init__(self) -> None:
        self.mean, self.steps = torch.zeros(1), 0

    def learn(self, scored: Reader[Guess]) -> None:
        guesses = [guess for chunk in scored for guess in chunk]
        baseline = sum(guess.reward for guess in guesses) / len(guesses)
        self.mean += 0.1 * sum((g.reward - baseline) * (g.position - self.mean) for g in guesses) / len(guesses)
        self.steps += 1
        self.record("learner/mean", float(self.mean))

    def weights(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean}

    @property
    def policy_version(self) -> int:
        return self.steps


if __name__ == "__main__":
    flow = Flow("target").worker("sampler", Sampler).worker("judge", Judge, 3.0).worker("learner", Learner)
    flow.stage("sampler", Sampler.draw, reads="seeds", writes="guesses")
    flow.stage("judge", Judge.score, reads="guesses", writes="scored", needs_device=False)
    flow.stage("learner", Learner.learn, reads="scored", ordered=True, trains=True)
    flow.weights("learner", to="sampler")
    cluster = Cluster.cpu_slots(2)
    plan = plan_for_mode(flow.graph(), cluster, sys.argv[1], num_ranks={"learner": 1})
    with Executor(cluster=cluster) as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        for step in range(30):
            context = StepContext(step=step, phase="train", seed=0, num_items=32)
            run = executor.run(flow, context=context, feeds={"seeds": list(range(32))})
            print(f"step {step}: mean {run.metrics['learner/mean']:.6f} (target 3)")

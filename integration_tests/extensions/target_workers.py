"""The workers of the custom job in target_job.py."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlinf_workers import Reader, Worker, Writer, record


@record
@dataclass(frozen=True)
class Guess:
    index: int
    position: float
    reward: float = 0.0


class Sampler(Worker):
    def __init__(self) -> None:
        self.mean = torch.zeros(1)

    def draw(self, seeds: Reader[int], guesses: Writer[Guess]) -> None:
        for chunk in seeds:
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

    def begin_checkpoint(self, folder: str) -> None:
        self._file = Path(folder, "learner.json")
        self._text = json.dumps({"mean": float(self.mean), "steps": self.steps})

    def end_checkpoint(self) -> dict[str, str]:
        self._file.write_text(self._text)
        return {self._file.name: hashlib.sha256(self._text.encode()).hexdigest()}

    def load_checkpoint(self, folder: str) -> None:
        state = json.loads(Path(folder, "learner.json").read_text())
        self.mean.fill_(state["mean"])
        self.steps = state["steps"]

"""Steps that overlap when a few completions are much longer than the others: `algorithm.max_staleness` 0, 1 and 2,
and 2 with groups that outlive their step (`rollout.sampler: as_finished`).

    python -m benchmarks.throughput.long_tails

The rollout is the product's, its engine sleeps for every decode step and ends completions at log-normal lengths, and
the trainer sleeps: so only the order of what happens is measured, on any machine. The trainer asserts the staleness of
every token. All kinds of steps take turns, in bursts; what is timed is from the end of the third step of a burst to the
end of its last.

The limit of a kind is the time of a step without overlap over the longer of: training; generation, which lasts as long
as its longest completion, or half as long where it may take two steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.bursts import burst
from benchmarks.harness import compare, interleave, report
from torch import Tensor

from rlinf_comm.weights import Layout, specs_of
from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, Reader, StepContext
from rlinf_workers.engines.base import Completions, UnfinishedCompletion, not_begun
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings
from rlinf_workers.engines.segments import extended
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.roles import LateGroup, Prompt, RolloutSettings, late_from_start
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.roles.staleness import Staleness
from rlinf_workers.testing.toy_flow import Learn

MODULE = "benchmarks.throughput.long_tails"
DECODE_S, TRAIN_S = 0.002, 0.25
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 48, 0.8, 256
NUM_PROMPTS, GROUP_SIZE = 16, 4
SAMPLING = SamplingSettings(group_size=GROUP_SIZE, max_new_tokens=MOST_TOKENS)
KINDS = {"0": (0, 0), "1": (1, 0), "2": (2, 0), "2, as finished": (1, 1)}
"""Kind of step -> steps that generation runs ahead, and steps by which a group may be late."""


@dataclass
class _Running:
    completion: UnfinishedCompletion
    num_tokens: int
    policy_version: int


class LogNormalEngine:
    """Ends completions at log-normal lengths, which belong to their noise; all run at once."""

    def __init__(self, model: ModelSettings, device: torch.device, **_: Any) -> None:
        self._weight = torch.zeros(1)
        self._running: list[_Running] = []
        self._version = -1

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int, step: int) -> None:
        for prompt in prompts:
            noise = NoiseKey(seed=seed, step=step, index=prompt.index)
            self.submit_unfinished(not_begun(prompt, sampling.group_size, noise), sampling)

    def submit_unfinished(self, unfinished: Sequence[UnfinishedCompletion], sampling: SamplingSettings) -> None:
        self._running += [_Running(one, len(one.token_ids), self._version) for one in unfinished]

    def finished(self) -> list[Completions]:
        if not self._running:
            return []
        num_steps = min(_length(one.completion) - one.num_tokens for one in self._running)
        time.sleep(num_steps * DECODE_S)
        for one in self._running:
            one.num_tokens += num_steps
        ended = [one for one in self._running if one.num_tokens == _length(one.completion)]
        self._running = [one for one in self._running if one.num_tokens < _length(one.completion)]
        return [self._completions(one) for one in ended]

    def suspend(self) -> list[UnfinishedCompletion]:
        suspended = [
            replace(
                one.completion,
                token_ids=torch.zeros(one.num_tokens, dtype=torch.int64),
                logprobs=torch.zeros(one.num_tokens),
                segments=extended(one.completion.segments, one.num_tokens, one.policy_version),
            )
            for one in self._running
        ]
        self._running = []
        return suspended

    def _completions(self, one: _Running) -> Completions:
        segments = extended(one.completion.segments, one.num_tokens, one.policy_version)
        return Completions(
            index=one.completion.prompt.index,
            members=(one.completion.member,),
            token_ids=torch.zeros(1, one.num_tokens, dtype=torch.int64),
            loss_mask=torch.ones(1, one.num_tokens),
            logprobs=torch.zeros(1, one.num_tokens),
            truncated=torch.tensor([False]),
            policy_version=segments[0].policy_version,
            segments=(segments,),
        )

    def free_capacity(self, group_size: int) -> int:
        return 4096

    def weights(self) -> Mapping[str, Tensor]:
        return {"weight": self._weight}

    def layout(self) -> Layout:
        return Layout.replicated(specs_of(self.weights()), 1)

    def weights_received(self, policy_version: int) -> None:
        self._version = policy_version

    num_steps = 0

    def interrupt(self, at_step: int = 0) -> None: ...

    def pause(self, on_new_weights: str) -> list[Completions]:
        return []

    def resume(self) -> None: ...

    def onload(self) -> None: ...

    def offload(self) -> None: ...

    def close(self) -> None: ...


def _length(one: UnfinishedCompletion) -> int:
    """Its tokens when it ends."""
    draw = np.random.default_rng([one.noise.step, one.noise.index, one.member])
    return min(MOST_TOKENS, max(1, round(MEDIAN_TOKENS * draw.lognormal(0.0, SIGMA))))


class PacedTrainer(Learn):
    """Trains for `TRAIN_S`, and asserts the staleness of every token, and that no prompt comes twice."""

    def __init__(self, max_staleness: int) -> None:
        super().__init__()
        self._staleness = Staleness(max_staleness)
        self._trained: Counter[tuple[int, ...]] = Counter()

    def train(self, samples: Reader[SampleGroup]) -> None:
        groups = [group for chunk in samples for group in chunk]
        assert sorted(group.index for group in groups) == list(range(NUM_PROMPTS))
        self._staleness.begin_step(self.policy_version)
        for group in groups:
            self._staleness.add(group.tokens_by_version(), f"prompt {group.index} has tokens")
            self._trained[tuple(group.prompt.token_ids.tolist())] += 1
        assert max(self._trained.values()) == 1, "a prompt was trained twice"
        for staleness, num_tokens in self._staleness.num_samples.items():
            self.record("staleness", staleness, weight=num_tokens)
        time.sleep(TRAIN_S)
        self._version += 1


def flow_of(kind: str) -> Flow:
    ahead, lateness = KINDS[kind]
    settings = RolloutSettings(
        model=ModelSettings(folder="", dtype="float32", has_weights=False),
        train=SAMPLING,
        evaluate=SAMPLING,
        max_prompt_tokens=1,
        engine=f"{MODULE}:LogNormalEngine",
        max_lateness=lateness,
    )
    flow = Flow(kind, max_staleness=ahead)
    flow.worker("rollout", "rlinf_workers.roles:Rollout", settings)
    flow.worker("trainer", f"{MODULE}:PacedTrainer", ahead + lateness)
    whole: dict[str, Any] = {"dispatch": "key", "granularities": (0,)}
    flow.stage("rollout", "generate", reads="prompts", writes="samples", **whole)
    flow.stage("trainer", "train", reads="samples", trains=True, **whole)
    return flow.weights("trainer", to="rollout")


def prompts_of(step: int, first: int = 0, count: int = NUM_PROMPTS) -> list[Prompt]:
    return [
        Prompt(index=index, token_ids=torch.tensor([step, index]), reference_answer="")
        for index in range(first, first + count)
    ]


class Steps:
    """The steps of one kind, in processes of their own."""

    def __init__(self, kind: str, executor: Executor, num_steps: int) -> None:
        self._executor, self._flow, self._num_steps = executor, flow_of(kind), num_steps
        self._ahead, lateness = KINDS[kind]
        self._num_done = 0
        self.staleness: list[float] = []
        cluster = Cluster.cpu_slots(2)
        plan = plan_for_mode(self._flow.graph(), cluster, "disaggregated")
        stages = tuple(replace(placed, granularity=0) for placed in plan.stages)
        executor.start(self._flow, replace(plan, stages=stages))
        executor.sync_weights()
        context = StepContext(step=0, phase="train", seed=0, num_items=NUM_PROMPTS)
        late: list[LateGroup] = [
            late_from_start(prompt, context, GROUP_SIZE)
            for prompt in prompts_of(0, NUM_PROMPTS, NUM_PROMPTS * lateness // 2)
        ]
        executor.group("rollout").call("go_on_with", [late])

    def burst(self, _: int) -> float:
        """Seconds per step."""
        runs, ended_s = burst(
            self._executor, self._begin, first=self._num_done, num_steps=self._num_steps, ahead=self._ahead
        )
        self._num_done += self._num_steps
        self.staleness += [run.metrics.get("staleness", 0.0) for run in runs]
        return (ended_s[-1] - ended_s[2]) / (self._num_steps - 3)

    def _begin(self, step: int) -> None:
        context = StepContext(step=step, phase="train", seed=0, num_items=NUM_PROMPTS)
        self._executor.begin(self._flow, context=context, feeds={"prompts": prompts_of(step)})


def limits() -> dict[str, float]:
    """Kind -> how many times as fast as "0" it can be."""
    longest_s = [
        max(
            _length(one)
            for prompt in prompts_of(step)
            for one in not_begun(prompt, GROUP_SIZE, NoiseKey(seed=0, step=step, index=prompt.index))
        )
        * DECODE_S
        for step in range(100)
    ]
    generation_s = statistics.mean(longest_s)
    shares = {kind: generation_s / (1 + lateness) for kind, (_, lateness) in KINDS.items()}
    in_turn_s = generation_s + TRAIN_S
    return {kind: in_turn_s / max(TRAIN_S, share) for kind, share in shares.items() if kind != "0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="steps of a burst")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    with ExitStack() as stack:
        kinds = {}
        for kind in KINDS:
            executor = stack.enter_context(Executor(cluster=Cluster.cpu_slots(2), env_vars={"OMP_NUM_THREADS": "1"}))
            kinds[kind] = Steps(kind, executor, options.steps)
        sides = {f"k = {kind}": partial(steps.burst) for kind, steps in kinds.items()}
        samples_s = interleave(sides, num_warmup=1, num_rounds=options.rounds)
    comparisons = [compare(samples_s, "k = 0", f"k = {kind}") for kind in KINDS if kind != "0"]
    findings = {
        "limits": limits(),
        "mean_staleness": {kind: statistics.mean(one.staleness) for kind, one in kinds.items()},
    }
    print(findings)
    report(
        "long-tails",
        settings={
            "decode_s": DECODE_S,
            "train_s": TRAIN_S,
            "tokens": {"median": MEDIAN_TOKENS, "sigma": SIGMA, "most": MOST_TOKENS},
            "num_prompts": NUM_PROMPTS,
            "group_size": GROUP_SIZE,
            "steps_of_a_burst": options.steps,
        },
        samples_s=samples_s,
        comparisons=comparisons,
        findings=findings,
        output=options.output,
    )


if __name__ == "__main__":
    main()

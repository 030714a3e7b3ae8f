"""Episodes of unequal length over several engines: a router against ranks that keep their own episodes.

    python -m benchmarks.throughput.router [--rounds 5]          writes benchmarks/results/router.json

Three engines of eight rows. A decode step of theirs sleeps, as a GPU computes while its host waits, so that engines do
not share the machine's cores; the model under it is tiny and its tokens are real. Turns of an episode are log-normal by
prompt: some prompts take many. Both sides get the same prompts, interleaved, and have to sample the same tokens.

`requests`: what a turn costs on its way through the router and back, against a rank's own agent process: one engine,
one session, turns of one token, without the sleep.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, interleave, report
from benchmarks.throughput.refill import write_model

from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, LocalLauncher, StepContext
from rlinf_workers.agents.settings import EpisodeSettings
from rlinf_workers.engines import HuggingFaceEngine, SamplingSettings
from rlinf_workers.models import ModelSettings
from rlinf_workers.roles import Prompt, RolloutSettings

ROUTER, RANKS = "router", "each rank its own"
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
NUM_ENGINES, NUM_ROWS, GROUP_SIZE, PROMPT_TOKENS = 3, 8, 8, 16
MAX_TURNS, MEDIAN_TURNS, SIGMA_TURNS = 10, 3.0, 0.8
REQUESTS = 200


class PacedEngine(HuggingFaceEngine):
    """The engine `huggingface`, whose decode steps sleep.

    Args:
        step_s: seconds.
    """

    def __init__(self, model: ModelSettings, device: torch.device, *, step_s: float, **options: Any) -> None:
        super().__init__(model, device, refill=True, **options)
        assert self._slots is not None, "with refill"
        step = self._slots._step

        def paced() -> Any:
            time.sleep(step_s)
            return step()

        self._slots._step = paced


async def unequal(session: Any, task: Any) -> float:
    """An agent: as many turns as the prompt takes."""
    draw = random.Random(task.text)
    num_turns = min(MAX_TURNS, max(1, round(draw.lognormvariate(math.log(MEDIAN_TURNS), SIGMA_TURNS))))
    messages = list(task.messages)
    for _ in range(num_turns):
        (turn,) = await session.chat(messages)
        messages += [turn.message(), {"role": "user", "content": "1234"}]
    return 0.0


async def requests(session: Any, task: Any) -> float:
    """An agent: many short turns, each a conversation of its own."""
    for _ in range(REQUESTS):
        await session.chat(task.messages)
    return 0.0


class Side:
    """An executor whose rollout has a router, or none."""

    def __init__(self, model: ModelSettings, folder: Path, agent: str, num_engines: int, **how: Any) -> None:
        new_tokens, room = how["new_tokens"], MAX_TURNS * (how["new_tokens"] + 8)
        episodes = EpisodeSettings(
            run=f"benchmarks.throughput.router:{agent}",
            max_turns=REQUESTS,
            max_context_tokens=PROMPT_TOKENS + room,
            max_new_tokens=new_tokens,
            max_episodes=256,
            max_idle_s=600.0,
            tokenizer_folder=model.folder,
            routed=how["routed"],
        )
        sampling = SamplingSettings(group_size=how["group_size"], max_new_tokens=new_tokens)
        settings = RolloutSettings(
            model=model,
            train=sampling,
            evaluate=sampling,
            max_prompt_tokens=episodes.max_prompt_tokens,
            max_batch_sequences=NUM_ROWS,
            engine="benchmarks.throughput.router:PacedEngine",
            engine_options={"step_s": how["step_s"]},
            agent=episodes,
        )
        self.flow = Flow("router").worker("rollout", "rlinf_workers.roles:AgentRollout", settings)
        if how["routed"]:
            self.flow.worker("router", "rlinf_workers.roles:SessionRouter", settings, shared_by="rollout")
        self.flow.stage("rollout", "generate", reads="prompts", writes="samples")
        cluster = Cluster.cpu_slots(num_engines)
        self.executor = Executor(
            cluster=cluster, launcher=LocalLauncher(), log_folder=folder, env_vars={"OMP_NUM_THREADS": "1"}
        )
        self.executor.start(
            self.flow, plan_for_mode(self.flow.graph(), cluster, "collocated", granularity={"rollout": 1})
        )
        self._num_engines, self._num_prompts = num_engines, how["num_prompts"]
        self.idle: list[float] = []
        self.digests: list[str] = []
        self.metrics: list[dict[str, float]] = []

    def step(self, index: int) -> float:
        """Seconds."""
        draw = random.Random(index)
        texts = ["".join(draw.choices("0123456789", k=PROMPT_TOKENS)) for _ in range(self._num_prompts)]
        prompts = [
            Prompt(index=i, token_ids=torch.tensor([2 + int(c) for c in text]), reference_answer="", text=text)
            for i, text in enumerate(texts)
        ]
        context = StepContext(step=index, phase="train", seed=0, num_items=len(prompts))
        run = self.executor.run(self.flow, context=context, feeds={"prompts": prompts})
        groups = sorted(run.collected["samples"], key=lambda group: group.index)
        self.digests.append(hashlib.sha256("".join(group.digest() for group in groups).encode()).hexdigest())
        self.metrics.append(run.metrics)
        ends = {span.worker: span.start_ns + span.duration_ns for span in run.spans if span.name == "rollout"}
        first = min(span.start_ns for span in run.spans if span.name == "rollout")
        idle_s = run.metrics.get("router/drained_s", 0.0)
        if len(ends) == self._num_engines and not idle_s:
            idle_s = statistics.mean(max(ends.values()) - end for end in ends.values()) / 1e9
        self.idle.append(idle_s / ((max(ends.values()) - first) / 1e9))
        return run.duration_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=18)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    torch.set_num_threads(1)
    unequal_kinds = {
        "new_tokens": options.new_tokens,
        "step_s": options.step_ms / 1000,
        "num_prompts": options.prompts,
        "group_size": GROUP_SIZE,
    }
    of_requests = {"new_tokens": 1, "step_s": 0.0, "num_prompts": 1, "group_size": 1}
    samples_s: dict[str, list[float]] = {}
    findings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"), eos_token_id=1, **TINY)
        for agent, num_engines, kinds in (("unequal", NUM_ENGINES, unequal_kinds), ("requests", 1, of_requests)):
            sides = {
                f"{agent}, {name}": Side(model, Path(folder, name), agent, num_engines, routed=name == ROUTER, **kinds)
                for name in (RANKS, ROUTER)
            }
            samples_s |= interleave(
                {name: side.step for name, side in sides.items()}, num_warmup=1, num_rounds=options.rounds
            )
            assert len({tuple(side.digests) for side in sides.values()}) == 1, "the sides sampled other tokens"
            for name, side in sides.items():
                side.executor.shutdown()
                findings[name] = {"idle_share": statistics.median(side.idle[1:]), "metrics": side.metrics[-1]}
    each, routed = (statistics.median(samples_s[f"requests, {name}"]) for name in (RANKS, ROUTER))
    findings["router_us_a_request"] = 1e6 * (routed - each) / REQUESTS
    report(
        "router",
        settings={
            "engines": NUM_ENGINES,
            "rows": NUM_ROWS,
            "median_turns": MEDIAN_TURNS,
            "sigma_turns": SIGMA_TURNS,
            **vars(options),
            "output": None,
        },
        samples_s=samples_s,
        comparisons=[
            compare(samples_s, f"{agent}, {ROUTER}", f"{agent}, {RANKS}") for agent in ("unequal", "requests")
        ],
        findings=findings,
        output=options.output,
    )


if __name__ == "__main__":
    main()

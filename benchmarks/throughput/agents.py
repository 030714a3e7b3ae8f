"""What episodes cost: benchmarks/results/agents.json has one turn against a plain completion, agents-sessions.json many
sessions at once.

    python -m benchmarks.throughput.agents [--of-sessions]

A Qwen2 with random weights, one thread. Every side of a case has as many conversations at once:

    plain       completions of the prompts by `Rollout`
    loop        the same prompts as episodes of one turn, by the built-in loop
    server      the same, by a harness that posts one request over HTTP
    sessions    episodes of several turns, whose number is log-normal, with log-normal latencies of a tool between them
    kept        the same with `keep_turns`

`plain`, `loop` and `server` draw other noise, so what counts is the time for each token. Beside it there is the CPU
time of the rank's process, which a busy machine changes less. An engine is busy while it computes; of `sessions` the
share is compared with that of `plain`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from benchmarks.harness import compare, interleave, report
from benchmarks.throughput.refill import SHAPE, write_model

from rlinf_workers import Flow, InProcessWorkers, StepContext
from rlinf_workers.agents.settings import EpisodeSettings
from rlinf_workers.engines import SamplingSettings
from rlinf_workers.models import ModelSettings
from rlinf_workers.roles import Prompt, RolloutSettings

PLAIN, LOOP, SERVER, SESSIONS, KEPT = "plain", "loop", "server", "sessions", "kept"
RUNS = {
    LOOP: "loop",
    SERVER: "benchmarks.throughput.agents:one_request",
    SESSIONS: "benchmarks.throughput.agents:several_turns",
    KEPT: "benchmarks.throughput.agents:several_turns",
}
LARGE: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
"""Ten million parameters."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and what it samples at once."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Of `SHAPE`."""
    group_size: int
    share: float = 1.0
    """Of the sessions that an option sets."""
    sides: tuple[str, ...] = (PLAIN, LOOP, SERVER)


OF_SESSIONS = Case(name="1M", group_size=1, sides=(PLAIN, SESSIONS, KEPT))
OF_ONE_TURN = (
    Case(name="1M", group_size=1),
    Case(name="1M, groups of 8", group_size=8),
    Case(name="10M, groups of 8", changes=LARGE, group_size=8, share=0.125),
)
CPU_TIME = "cpu time"
PROMPT_TOKENS, MAX_TURNS = 16, 12
MEAN_TURNS, SIGMA_TURNS = 3.0, 0.7
MEDIAN_LATENCY_S, SIGMA_LATENCY = 0.02, 1.0


async def one_request(base_url: str, task: dict[str, Any], *, session: Any) -> float:
    """A harness: one turn over HTTP."""
    body = {"model": "policy", "messages": task["messages"]}
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with client().post(f"{base_url}/chat/completions", json=body, headers=headers) as answer:
        await answer.read()
    return 0.0


@cache
def client() -> aiohttp.ClientSession:
    """The connections of all episodes."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def several_turns(session: Any, task: Any) -> float:
    """An agent: turns with a tool's latency between them."""
    draw = random.Random(task.name)
    num_turns = min(MAX_TURNS, max(1, round(draw.lognormvariate(math.log(MEAN_TURNS), SIGMA_TURNS))))
    messages = list(task.messages)
    for number in range(num_turns):
        (turn,) = await session.chat(messages)
        if number + 1 < num_turns:
            await asyncio.sleep(draw.lognormvariate(math.log(MEDIAN_LATENCY_S), SIGMA_LATENCY))
        messages += [turn.message(), {"role": "user", "content": "".join(draw.choices("0123456789", k=4))}]
    return 0.0


class Side:
    """A rollout, whose engine's busy time is measured."""

    def __init__(self, name: str, case: Case, model: ModelSettings, options: argparse.Namespace) -> None:
        num_sessions = int(case.share * options.sessions)
        self._num_prompts = 2 * num_sessions // case.group_size
        num_turns = MAX_TURNS if name in (SESSIONS, KEPT) else 1
        room = num_turns * (options.new_tokens + PROMPT_TOKENS)
        agent = EpisodeSettings(
            run=RUNS.get(name, ""),
            max_turns=num_turns,
            max_context_tokens=PROMPT_TOKENS + room,
            max_new_tokens=options.new_tokens,
            max_episodes=num_sessions,
            max_idle_s=600.0,
            tokenizer_folder=model.folder,
        )
        sampling = SamplingSettings(group_size=case.group_size, max_new_tokens=options.new_tokens)
        settings = RolloutSettings(
            model=model,
            train=sampling,
            evaluate=sampling,
            max_prompt_tokens=PROMPT_TOKENS if name == PLAIN else agent.max_prompt_tokens,
            max_batch_sequences=num_sessions,
            engine_options={"refill": True, "keep_turns": name == KEPT},
            agent=None if name == PLAIN else agent,
        )
        worker = "rlinf_workers.roles:Rollout" if name == PLAIN else "rlinf_workers.roles:AgentRollout"
        flow = Flow("agents").worker("rollout", worker, settings)
        flow.stage("rollout", "generate", reads="prompts", writes="samples")
        self.workers = InProcessWorkers(flow)
        self._rollout = self.workers["rollout"]
        self._rollout.weights_received(0)
        self._engine = self._rollout._engine
        self._finished, self._engine.finished = self._engine.finished, self._timed
        self._busy_s = 0.0
        self.cpu_s: list[float] = []
        """Of the rank, for a thousand tokens."""
        self.busy: list[float] = []
        self.num_turns: list[int] = []
        self.memory_bytes: list[int] = []
        """Resident, of this process and its agent process, after a step."""

    def _timed(self) -> Any:
        began = time.perf_counter()
        try:
            return self._finished()
        finally:
            self._busy_s += time.perf_counter() - began

    def step(self, index: int) -> float:
        """Seconds for a thousand tokens."""
        draw = random.Random(index)
        texts = ["".join(draw.choices("0123456789", k=PROMPT_TOKENS)) for _ in range(self._num_prompts)]
        prompts = [
            Prompt(index=i, token_ids=torch.tensor([2 + int(c) for c in text]), reference_answer="", text=text)
            for i, text in enumerate(texts)
        ]
        self.workers.begin(StepContext(step=index, phase="train", seed=0, num_items=len(prompts)))
        self._busy_s, began, began_cpu = 0.0, time.perf_counter(), time.process_time()
        groups = [group for whole in self._rollout.sample(prompts) for group in whole]
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        assert sorted(group.index for group in groups) == list(range(len(prompts))), "a session was lost or mixed up"
        num_tokens = sum(float(group.loss_mask.sum()) for group in groups)
        self.busy.append(self._busy_s / wall_s)
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self.memory_bytes.append(sum(process.memory_info().rss for process in processes))
        self.cpu_s.append(1000 * cpu_s / num_tokens)
        self.num_turns.append(sum(sum(s.author == "policy" for s in row) for g in groups for row in g.segments))
        return 1000 * wall_s / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--of-sessions", action="store_true")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cases = (OF_SESSIONS,) if options.of_sessions else OF_ONE_TURN
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Side] = {}
        for case in cases:
            model = write_model(Path(folder, case.name), eos_token_id=1, **case.changes)
            sides |= {f"{name}, {case.name}": Side(name, case, model, options) for name in case.sides}
        samples_s = interleave(
            {name: side.step for name, side in sides.items()}, num_warmup=1, num_rounds=options.rounds
        )
        for side in sides.values():
            side.workers.close()
    samples_s |= {f"{name}, {CPU_TIME}": side.cpu_s[1:] for name, side in sides.items()}
    busy = {name: statistics.median(side.busy[1:]) for name, side in sides.items()}
    findings = {
        "unit": "seconds for a thousand tokens",
        "engine_busy": busy,
        "turns_a_step": {name: statistics.median(side.num_turns[1:]) for name, side in sides.items()},
    }
    if options.of_sessions:
        findings["memory_bytes"] = {name: side.memory_bytes for name, side in sides.items()}
        findings["busy_against_plain"] = {
            name: share / busy[f"{PLAIN}, {OF_SESSIONS.name}"] for name, share in busy.items()
        }
    print(json.dumps(findings, indent=1))
    report(
        "agents-sessions" if options.of_sessions else "agents",
        settings={
            "sessions": options.sessions,
            "prompt_tokens": PROMPT_TOKENS,
            "max_new_tokens": options.new_tokens,
            "mean_turns": MEAN_TURNS,
            "median_latency_s": MEDIAN_LATENCY_S,
            "threads": 1,
            "shape": SHAPE,
            "cases": [asdict(case) for case in cases],
        },
        samples_s=samples_s,
        comparisons=[
            compare(samples_s, f"{side}, {case.name}{kind}", f"{case.sides[0]}, {case.name}{kind}")
            for case in cases
            for side in case.sides[1:]
            for kind in ("", f", {CPU_TIME}")
        ],
        findings=findings,
        output=options.output,
    )


if __name__ == "__main__":
    main()

"""Random runs whose steps overlap, checked and replayed.

    python staleness_runs.py FOLDER NUMBER NUM_REPLAYED [SEED] [agents]

Settings, lengths, pauses and what disturbs a run are drawn from the seed; rewards and their time are not, so no two
runs are the same. With `agents`, episodes of one to three turns take the place of completions; their agent draws what
it says, how often and when. staleness_checker.py checks the folder of each run when it has ended. The first
NUM_REPLAYED runs are replayed, and both have to end with the same weights. A line of JSON for each run says what became
of it.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from command_line import (
    END_TIMEOUT_S,
    RLINF,
    TINY_SORT,
    command,
    steps_done,
    weights,
    worker_processes,
)
from preloaded_command_line import start
from staleness_checker import check

NUM_AT_ONCE = 2
PAUSE_S = 1.0
SIGNALS = {
    "kill": (signal.SIGKILL,),
    "pause": (signal.SIGSTOP, signal.SIGCONT),
    "interrupt": (signal.SIGINT,),
}
REWARD = """
import random
import time

draw = random.SystemRandom()


def score(completion, answer):
    time.sleep(draw.choice([0.0, 0.0, 0.002, 0.01]))
    return draw.random()
"""
AGENT = """
import asyncio
import random

draw = random.SystemRandom()


async def play(session, task):
    messages = list(task.messages)
    for _ in range(draw.randint(1, 3)):
        (turn,) = await session.chat(messages)
        session.reward_turn(turn, draw.random())
        await asyncio.sleep(draw.choice([0.0, 0.0, 0.002, 0.02]))
        messages += [turn.message(), {"role": "user", "content": draw.choice("0123456789")}]
    return draw.random()
"""
AGENT_SETTINGS = {
    "rollout.agent": "{run: random_agent:play, max_turns: 3, max_context_tokens: 64}",
    "rollout.max_prompt_tokens": 8,
    "reward": "{kind: episode}",
}
SETTINGS = {key: value for key, value in TINY_SORT.items() if not key.startswith("sft_warm_up")} | {
    "sft_warm_up": "null",
    "reward": "{kind: function, path: random_reward:score}",
    "run.record": "true",
    "run.loggers": "{tensorboard: null}",
    "task.num_held_out": 8,
    "model.architecture.hidden_size": 16,
    "model.architecture.intermediate_size": 16,
    "model.architecture.num_layers": 1,
}


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A run and what disturbs it."""

    max_staleness: int
    sampler: str
    num_prompts: int
    group_size: int
    max_new_tokens: int
    num_minibatches: int
    num_ranks: int
    """Of the rollout."""
    num_steps: int
    evaluate_every: int
    checkpoint_every: int
    disturbance: str
    """none, or what SIGNALS has."""
    after_step: int
    """When it is disturbed."""
    delay_s: float
    """And how much later."""
    victim: float
    """Which process, in [0, 1): the driver or a worker."""
    on_new_weights: str
    has_agents: bool

    def overrides(self) -> dict[str, Any]:
        needs_refill = self.sampler == "as_finished" or self.on_new_weights != "finish" or self.has_agents
        refill = {"rollout.engine_options": "{refill: true}"} if needs_refill else {}
        return SETTINGS | refill | (AGENT_SETTINGS if self.has_agents else {}) | {
            "algorithm.max_staleness": self.max_staleness,
            "rollout.sampler": self.sampler,
            "rollout.on_new_weights": self.on_new_weights,
            "rollout.num_prompts": self.num_prompts,
            "algorithm.group_size": self.group_size,
            "rollout.max_new_tokens": self.max_new_tokens,
            "algorithm.num_minibatches": self.num_minibatches,
            "cluster.num_devices": self.num_ranks + 1,
            "plan.num_ranks.rollout": self.num_ranks,
            "run.num_steps": self.num_steps,
            "run.evaluate_every": self.evaluate_every,
            "run.checkpoint_every": self.checkpoint_every,
        }  # fmt: skip


def drawn(seed: int, number: int, *, has_agents: bool) -> Draw:
    draw = random.Random(f"{seed}, {number}")
    max_staleness, num_steps = number % 5, draw.randint(9, 13)
    return Draw(
        max_staleness=max_staleness,
        sampler="as_finished" if max_staleness >= 2 and draw.random() < 0.6 else "in_order",
        num_prompts=draw.choice([4, 6]),
        group_size=draw.choice([2, 4]),
        max_new_tokens=draw.choice([4, 12, 24]),
        num_minibatches=draw.choice([1, 1, 2]),
        num_ranks=draw.choice([1, 1, 2]),
        num_steps=num_steps,
        evaluate_every=draw.choice([4, 7, 100]),
        checkpoint_every=draw.choice([3, 5, 8]),
        disturbance=draw.choice(["none", "pause", "kill", "kill", "kill", "interrupt"]),
        after_step=draw.randint(1, num_steps - 3),
        delay_s=draw.uniform(0.0, 0.3),
        victim=draw.random(),
        on_new_weights=draw.choice(["finish", "keep", "recompute"]) if max_staleness else "finish",
        has_agents=has_agents,
    )


def main(folder: Path, num_runs: int, num_replayed: int, seed: int, *, has_agents: bool = False) -> int:
    """Returns how many runs are wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "random_reward.py").write_text(REWARD)
    (folder / "random_agent.py").write_text(AGENT)
    num_wrong = 0
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for row in pool.map(partial(one_run, folder, num_replayed, seed, has_agents), range(num_runs)):
            print(json.dumps(row), flush=True)
            num_wrong += bool(row["mistakes"])
    return num_wrong


def one_run(folder: Path, num_replayed: int, seed: int, has_agents: bool, number: int) -> dict[str, Any]:
    """Does a run, checks it, and replays it if its number is below `num_replayed`."""
    draw, output = drawn(seed, number, has_agents=has_agents), folder / f"run-{number}"
    row: dict[str, Any] = {"run": number} | asdict(draw)
    try:
        row["happened"] = disturbed_run(draw, output, folder)
        outcome = check(output)
        row |= {
            "tokens_by_age": dict(outcome.tokens_by_age),
            "groups_by_lateness": dict(outcome.groups_by_lateness),
            "num_takes": outcome.num_takes,
            "num_mixed_groups": outcome.num_mixed_groups,
            "mistakes": outcome.mistakes + notes(output),
        }
        if number < num_replayed:
            row["replayed"] = replayed(output, folder)
            row["mistakes"] += [] if row["replayed"] == "equal" else [f"replay: {row['replayed']}"]
    except AssertionError as error:
        row["mistakes"] = [str(error)]
    if not row["mistakes"]:
        shutil.rmtree(output)
        shutil.rmtree(f"{output}-again", ignore_errors=True)
    return row


def disturbed_run(draw: Draw, output: Path, folder: Path) -> str:
    """Does a run, and resumes it if the disturbance ended it. Returns what happened."""
    process = launch(command("sort-grpo", output, draw.overrides()), output, folder)
    happened = "none"
    if draw.disturbance != "none":
        while process.is_alive() and steps_done(output) < draw.after_step:
            time.sleep(0.02)
        time.sleep(draw.delay_s)
        happened = disturb(draw, process, output) if process.is_alive() else "none"
    finish(process, output, may_fail=happened in ("kill driver", "interrupt driver"))
    if steps_done(output) < draw.num_steps or not (output / "result.json").exists():
        finish(launch(command(None, output, {}), output, folder), output)
    assert steps_done(output) == draw.num_steps, f"the run ended after {steps_done(output)} steps"
    return happened


def disturb(draw: Draw, process: BaseProcess, output: Path) -> str:
    """Returns what was done; none if the run had ended."""
    assert process.pid is not None, "it was started"
    processes = [("driver", process.pid), *sorted(worker_processes(output).items())]
    name, pid = processes[0 if draw.disturbance == "interrupt" else int(draw.victim * len(processes))]
    try:
        for one in SIGNALS[draw.disturbance]:
            os.kill(pid, one)
            time.sleep(PAUSE_S if one == signal.SIGSTOP else 0)
    except ProcessLookupError:
        return "none"
    return f"{draw.disturbance} {name}"


def launch(line: list[str], output: Path, folder: Path) -> BaseProcess:
    """Starts a command line of `rlinf`; its log is beside the run."""
    return start(line[len(RLINF) :], log_of(output), folder)


def log_of(output: Path) -> Path:
    return Path(f"{output}.log")


def finish(process: BaseProcess, output: Path, *, may_fail: bool = False) -> None:
    """Waits for the end of a run. Raises: AssertionError with the end of its log."""
    process.join(END_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"no end after {END_TIMEOUT_S} s")
    assert may_fail or process.exitcode == 0, log_of(output).read_text()[-2000:]


def notes(output: Path) -> list[str]:
    """Steps that were done in another way after an interruption."""
    manifest = json.loads((output / "manifest.json").read_text())
    return [text for text in map(str, manifest.get("notes", [])) if "is not the one that was recorded" in text]


def replayed(run: Path, folder: Path) -> str:
    """Replays a run. Returns `equal`, or what differs."""
    again = Path(f"{run}-again")
    try:
        finish(launch([*RLINF, "replay", str(run), "--output", str(again)], again, folder), again)
    except AssertionError as error:
        return str(error)
    return "equal" if weights(again) == weights(run) else "other weights"


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[2:] if text != "agents"]
    num_wrong = main(
        Path(sys.argv[1]),
        numbers[0],
        numbers[1],
        numbers[2] if len(numbers) > 2 else 0,
        has_agents="agents" in sys.argv,
    )
    sys.exit(min(num_wrong, 1))

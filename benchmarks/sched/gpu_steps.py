"""Steps of training recipes on one GPU, beside what `rlinf plan` derives for them, and the memory of each role beside
its prediction: results/gpu-steps.json.

    python -m benchmarks.sched.gpu_steps [--rounds 5] [--only NAME ...]

Models have public shapes and random weights, so that every answer is as long as the limit; the derivation is told so,
and how long the prompts are. Each workload runs its ordinary steps, and before them its probe steps, of which
`rlinf profile` makes a profile (`--probes 0`: none). Predictions go through the simulator. Memory is what the driver
counts for the processes of each role at the peak, as in a run's memory.json.
On a CPU (`--tiny`) the script itself is tried, with nothing derived that means anything, and no memory.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import report
from benchmarks.sched.rank_cases import ON_GPU
from benchmarks.sched.real_runs import NUM_WARMUP, Placed, Probing, started

from rlinf import jobs
from rlinf.config.devices import resolve_for_devices
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.jobs.base import Job
from rlinf.jobs.reasoning.flow import job_shape
from rlinf.jobs.reasoning.memory import with_budget_on
from rlinf.jobs.reasoning.planning import recipe_profiles
from rlinf.planning.plans import make_plans
from rlinf.planning.problems import problem_of_recipe
from rlinf.tasks.language import character_tokenizer
from rlinf_sched import Plan, Problem, plan_for_mode, simulate
from rlinf_sched.derive import Lengths, find_gpu, resolve_model
from rlinf_workers import Profiler

NUM_PROBES = 4
MODEL, QUESTIONS, HELD_OUT = "model", "questions.jsonl", "held-out.jsonl"
Predicted = dict[str, Any]
PROMPT_TOKENS = 128
QWEN = ON_GPU["Qwen2.5-0.5B"]
_CHARACTERS = [chr(code) for code in range(0x20000, 0x20000 + 1000)]
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.5B": QWEN,
    "1.5B": {
        **QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "tiny": {**QWEN, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""Qwen2.5-0.5B and -1.5B, by their public configurations."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One recipe with one model."""

    recipe: str
    model: str
    num_prompts: int
    new_tokens: int
    overrides: Sequence[str] = ()


WORKLOADS = {
    "0.5B, 64 x 8 x 256": Workload(recipe="gsm8k-grpo-fsdp2", model="0.5B", num_prompts=64, new_tokens=256),
    "1.5B, 32 x 8 x 256": Workload(
        recipe="gsm8k-grpo-fsdp2",
        model="1.5B",
        num_prompts=32,
        new_tokens=256,
        overrides=["--algorithm.kl_coef", "0"],
    ),
    "1.5B, LoRA, 16 x 8 x 256": Workload(recipe="gsm8k-grpo-lora", model="1.5B", num_prompts=16, new_tokens=256),
    "0.5B, long answers, 8 x 8 x 1024": Workload(
        recipe="gsm8k-grpo-fsdp2", model="0.5B", num_prompts=8, new_tokens=1024
    ),
    "0.5B, float32, 16 x 8 x 128": Workload(
        recipe="gsm8k-grpo",
        model="0.5B",
        num_prompts=16,
        new_tokens=128,
        overrides=["--algorithm.kl_coef", "0"],
    ),
    "0.5B, PPO with a critic, 32 x 4 x 256": Workload(
        recipe="gsm8k-grpo-fsdp2",
        model="0.5B",
        num_prompts=32,
        new_tokens=256,
        overrides=["--algorithm.name", "ppo", "--algorithm.group_size", "4", "--algorithm.kl_coef", "0"],
    ),
}
"""In order of importance; the engine is `huggingface`."""
SERVED = {"0.5B, SGLang, 64 x 8 x 256": "0.5B, 64 x 8 x 256", "1.5B, SGLang, 32 x 8 x 256": "1.5B, 32 x 8 x 256"}
"""Workload with SGLang -> the one with `huggingface`."""
SGLANG = {
    name: replace(WORKLOADS[plain], overrides=[*WORKLOADS[plain].overrides, "--rollout.engine", "sglang"])
    for name, plain in SERVED.items()
}
"""Where it is installed."""
TINY = {"tiny": Workload(recipe="gsm8k-grpo", model="tiny", num_prompts=4, new_tokens=8)}


def write_model(folder: Path, shape: Mapping[str, Any], device: str) -> None:
    """A Hugging Face folder with random weights."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = character_tokenizer("".join(_CHARACTERS))
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(**{**shape, **ends})
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_questions(path: Path, number: int, *, seed: int) -> None:
    drawn = random.Random(seed)
    questions = ("".join(drawn.choices(_CHARACTERS, k=PROMPT_TOKENS)) for _ in range(number))
    path.write_text("".join(json.dumps({"question": text, "answer": "#### 1"}) + "\n" for text in questions))


def config_of(workload: Workload, folder: Path) -> Any:
    """The recipe with its model and questions in the folder."""
    settings = {
        "model.path": str(folder / MODEL),
        "task.train_files": f"[{folder / QUESTIONS}]",
        "task.eval_files": f"[{folder / HELD_OUT}]",
        "task.prompt_template": '"{question}"',
        "task.prompt_format": "plain",
        "reward.kind": "random",
        "rollout.num_prompts": str(workload.num_prompts),
        "rollout.max_new_tokens": str(workload.new_tokens),
        "rollout.max_prompt_tokens": str(PROMPT_TOKENS),
        "cluster.num_devices": "1",
        "mode": "collocated",
    }
    overrides = [text for key, value in settings.items() for text in (f"--{key}", value)]
    return load_config(workload.recipe, parse_overrides([*overrides, *workload.overrides]))


def derived(config: Any, gpu: str) -> Predicted:
    """From what `rlinf plan RECIPE --gpu` derives, with the lengths that answers have here."""
    problem, sheet, shape = problem_of_recipe(config, gpu=gpu), find_gpu(gpu), resolve_model(config.model.path)
    rollout = config.rollout
    lengths = Lengths(
        mean_tokens=rollout.max_new_tokens,
        limit_tokens=rollout.max_new_tokens,
        prompt_tokens=PROMPT_TOKENS,
        group_size=config.algorithm.group_size,
        sigma=0.0,
    )
    resolved = resolve_for_devices(config, 1)
    assert isinstance(resolved, ReasoningConfig), "settling keeps the job"
    resolved = with_budget_on(resolved, shape, problem.cluster)
    job = replace(job_shape(resolved, device_bytes=sheet.memory_bytes), lengths=lengths)
    profiles = recipe_profiles(problem.flow, config, shape, sheet, job)
    plan = plan_for_mode(problem.flow, problem.cluster, "collocated")
    plan = replace(plan, stages=tuple(replace(stage, offload=False) for stage in plan.stages))  # all has room at once
    return predicted(replace(problem, profiles=profiles), plan)


def predicted(problem: Problem, plan: Plan) -> Predicted:
    """What the simulator makes of a profile."""
    timeline = simulate(problem, plan)
    return {
        "step_s": timeline.step_s,
        "stages_s": {name: timeline.busiest_s(name, "compute", "step") for name in timeline.stages},
    }


def memory_of(job: Job, placed: Placed) -> dict[str, Any]:
    """Role -> predicted and measured bytes of its processes on the GPU; empty where the driver counts none."""
    if job.memory is None:
        return {}
    roles: dict[str, Any] = {}
    for load in job.memory.fullest_place(placed.plan).loads:
        measured = placed.executor.group(load.group).call("held_gpu_bytes")
        if held := [num_bytes for num_bytes in measured if num_bytes is not None]:
            roles[load.group] = {"predicted_bytes": load.predicted_gpu_bytes, "measured_bytes": max(held)}
    return roles


def measure(
    workload: Workload, scratch: Path, gpu: str, *, num_warmup: int, num_probes: int, num_rounds: int
) -> dict[str, Any]:
    """Steps of a workload, what is predicted of them, and memory."""
    folder = scratch / "run"
    folder.mkdir()
    write_model(scratch / MODEL, SHAPES[workload.model], "cuda" if torch.cuda.is_available() else "cpu")
    write_questions(scratch / QUESTIONS, 2 * workload.num_prompts, seed=0)
    write_questions(scratch / HELD_OUT, 1, seed=1)
    config = config_of(workload, scratch)
    job = jobs.prepare(config)
    flows = job.build(folder)
    job.write_inputs(folder)
    planned = make_plans(job, flows, folder)
    graph = flows.train.graph()
    with started(job, flows, planned.plans[flows.train.name], folder, planned.cluster) as side:
        for index in range(NUM_WARMUP - num_warmup, NUM_WARMUP):
            side.step(index)
        predictions = {"derived": derived(config, gpu)}
        if num_probes:
            own = Profiler(graph, planned.cluster, job.num_items)
            same = {key: getattr(side, key) for key in ("job", "flows", "executor", "plan")}
            probing = Probing(**same, profiler=own, also=side.profiler)
            for index in range(NUM_WARMUP, NUM_WARMUP + num_probes):
                probing.step(index)
        samples_s = [side.step(index) for index in range(NUM_WARMUP, NUM_WARMUP + num_rounds)]
        if num_probes:
            predictions["profile"] = predicted(probing.measured().problem, side.plan)
        steps_s, memory = list(side.stages_s), memory_of(job, side)
    return {
        "step_s": statistics.median(samples_s),
        "samples_s": samples_s,
        "stages_s": {name: statistics.median(step.get(name, 0.0) for step in steps_s) for name in steps_s[0]},
        "predicted": predictions,
        "memory": memory,
    }


def summary(rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Over all workloads: errors of derived steps, and predicted over measured memory of a workload's roles."""

    def total(memory: Mapping[str, Any], key: str) -> int:
        return sum(role[key] for role in memory.values())

    errors = [abs(row["predicted"]["derived"]["step_s"] / row["step_s"] - 1) for row in rows.values()]
    steps: dict[str, Any] = {"median_error": statistics.median(errors), "worst_error": max(errors)}
    steps["sglang_over_huggingface"] = {
        SGLANG[served].model: rows[served]["step_s"] / rows[plain]["step_s"]
        for served, plain in SERVED.items()
        if served in rows and plain in rows
    }
    measured = [row["memory"] for row in rows.values() if row["memory"]]
    if not measured:
        return steps
    ratios = [total(memory, "predicted_bytes") / total(memory, "measured_bytes") for memory in measured]
    return {**steps, "least_memory_ratio": min(ratios), "most_memory_ratio": max(ratios)}


def derive_again(rows: dict[str, Any], gpu: str) -> None:
    """Puts what is derived today beside what was measured."""
    for name, row in rows.items():
        with tempfile.TemporaryDirectory(prefix="rlinf-gpu-steps-") as scratch:
            folder = Path(scratch) / MODEL
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(SHAPES[WORKLOADS[name].model]))
            row["predicted"]["derived"] = derived(config_of(WORKLOADS[name], Path(scratch)), gpu)


def described(row: dict[str, Any]) -> str:
    """A workload's errors, and its memory, as a line."""
    errors = {source: one["step_s"] / row["step_s"] - 1 for source, one in row["predicted"].items()}
    texts = [f"{name} {error:+.1%}" for name, error in errors.items()]
    memory = [
        f"{role} {size['predicted_bytes'] / 2**30:.1f} of {size['measured_bytes'] / 2**30:.1f} GiB"
        for role, size in row["memory"].items()
    ]
    return f"{row['step_s']:.3f} s; predicted: " + ", ".join([*texts, *memory])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=NUM_WARMUP, help=f"steps that do not count, up to {NUM_WARMUP}")
    parser.add_argument("--probes", type=int, default=NUM_PROBES, help="steps of which a profile is made")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begins no workload after as many")
    parser.add_argument("--gpu", default="H100", help="a product that the planner has a datasheet of")
    parser.add_argument("--only", nargs="*", choices=[*WORKLOADS, *SGLANG])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--derive", type=Path, metavar="FILE", help="runs nothing: derives anew for what FILE measured")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.derive:
        content = json.loads(options.derive.read_text())
        rows = content["findings"]["workloads"]
        derive_again(rows, options.gpu)
        options.derive.write_text(json.dumps(content, indent=2) + "\n")
        for name, row in rows.items():
            print(f"{name}: {described(row)}")
        return
    start_s = time.monotonic()
    every = WORKLOADS | (SGLANG if find_spec("sglang") else {})
    workloads = TINY if options.tiny else {name: {**WORKLOADS, **SGLANG}[name] for name in options.only or every}
    steps = {"num_warmup": options.warmup, "num_probes": options.probes, "num_rounds": options.rounds}
    rows: dict[str, Any] = {}
    for name, workload in workloads.items():
        if time.monotonic() - start_s > options.seconds:
            print(f"{name}: not begun, {options.seconds:g} s have passed")
            continue
        with tempfile.TemporaryDirectory(prefix="rlinf-gpu-steps-") as scratch:
            rows[name] = measure(workload, Path(scratch), options.gpu, **steps)
        print(f"{name}: {described(rows[name])}", flush=True)
        report(
            "gpu-steps",
            settings={
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "prompt_tokens": PROMPT_TOKENS,
                **steps,
            },
            samples_s={},
            comparisons=[],
            findings={"workloads": rows, "summary": summary(rows)},
            output=options.output,
        )


if __name__ == "__main__":
    main()

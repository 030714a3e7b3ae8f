"""Peak memory of real workers on CPU slots beside `rlinf.jobs.reasoning.memory`: benchmarks/results/memory.json.

    python benchmarks/sched/memory.py [CASE ... | --recount]

A worker's peak is its VmHWM (kernel, proc(5)); the least that a worker takes is that of the reward worker, which has no
model. What is counted are the longest prompts and completions that a recipe allows, so the cases reach them: the
likeliest token is always taken, and a model that knows nothing hardly ever ends an answer with it.
"""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ArchitectureConfig, ReasoningConfig
from rlinf.jobs.reasoning.memory import loads_of, shape_of, stored_bytes
from rlinf.planning.plans import plans_by_rule
from rlinf.tasks import make_task
from rlinf.tasks.language import character_tokenizer
from rlinf_sched.derive import ModelShape

RESULT = Path(__file__).parents[1] / "results" / "memory.json"
POLL_S = 0.1
SHORT = {
    "mode": "collocated",
    "cluster.num_devices": 1,
    "run.num_steps": 6,
    "run.evaluate_every": 6,
    "run.checkpoint_every": 3,
    "run.stop_at_score": "null",
}
MADE = {
    "sft_warm_up": "null",
    "task.num_held_out": 8,
    "algorithm.kl_coef": 0.01,
    "rollout.num_prompts": 16,
    "rollout.temperature": 0.01,
    "actor.micro_batch_groups": 4,
}
LAYERS = {"hidden_size": 768, "intermediate_size": 2048, "num_layers": 12, "num_heads": 12, "num_kv_heads": 4}
THIN = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2}
NUM_WORDS = 8000
PROMPT_TOKENS = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A recipe, and what is changed in it."""

    about: str
    recipe: str = "sort-grpo"
    overrides: dict[str, object] = field(default_factory=dict)
    architecture: dict[str, int] = field(default_factory=dict)
    """Sizes of the model that is made for this case, where the recipe's are not used."""


CASES = {
    "layers": Case(
        about="weights dominate",
        overrides={**MADE, "rollout.max_prompt_tokens": 9, "rollout.max_new_tokens": 9},
        architecture=LAYERS,
    ),
    "long": Case(
        about="sequences dominate",
        overrides={
            **MADE,
            "task.kind": "add",
            "task.num_digits": 32,
            "rollout.max_prompt_tokens": 66,
            "rollout.max_new_tokens": 120,
        },
        architecture={**THIN, "max_positions": 256},
    ),
    "words": Case(
        about="logits dominate; prompts of several lengths",
        recipe="gsm8k-grpo",
        overrides={
            **MADE,
            "reward.kind": "random",
            "task.prompt_template": '"{question}"',
            "rollout.max_prompt_tokens": PROMPT_TOKENS,
            "rollout.max_new_tokens": 64,
            "actor.num_shards": 2,
        },
        architecture={**THIN, "num_layers": 4, "max_positions": 256},
    ),
    "recipe": Case(about="sort-grpo with its SFT warm-up", overrides={"sft_warm_up.reuse": "false"}),
    "two ranks": Case(
        about="layers, on two slots",
        overrides={**MADE, "cluster.num_devices": 2, "rollout.max_prompt_tokens": 9, "rollout.max_new_tokens": 9},
        architecture={**LAYERS, "num_layers": 6},
    ),
    "critic": Case(
        about="long, by PPO",
        overrides={
            **MADE,
            "algorithm.name": "ppo",
            "task.kind": "add",
            "task.num_digits": 32,
            "rollout.max_prompt_tokens": 66,
            "rollout.max_new_tokens": 60,
        },
        architecture={**THIN, "max_positions": 256},
    ),
}


def overrides_of(case: Case, scratch: Path) -> list[str]:
    """The command line's, with the inputs that they name."""
    chosen = {**SHORT, **case.overrides}
    if case.recipe == "gsm8k-grpo":
        chosen |= _made_inputs(case, scratch)
    else:
        chosen |= {f"model.architecture.{key}": value for key, value in case.architecture.items()}
    return [f"--{key}={value}" for key, value in chosen.items()]


def _made_inputs(case: Case, scratch: Path) -> dict[str, object]:
    """A model folder with weights, a token for each character, and rows of several lengths."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlinf.tasks.language import write_model_folder

    alphabet = "0123456789# " + "".join(chr(0x4E00 + index) for index in range(NUM_WORDS))
    folder, generator = scratch / "model", random.Random(0)
    write_model_folder(folder, ArchitectureConfig(**case.architecture), alphabet, "float32")  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=torch.float32
    ).save_pretrained(folder)
    for name in ("train", "test"):
        lengths = [PROMPT_TOKENS, *(generator.randint(PROMPT_TOKENS // 2, PROMPT_TOKENS) for _ in range(63))] * 4
        rows = [{"question": "".join(generator.choices(alphabet[12:], k=n)), "answer": "#### 1"} for n in lengths]
        (scratch / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model.path": folder,
        "task.train_files": f"[{scratch / 'train.jsonl'}]",
        "task.eval_files": f"[{scratch / 'test.jsonl'}]",
    }


def measure(recipe: str, overrides: list[str], folder: Path) -> dict[str, int]:
    """Worker -> VmHWM in bytes of its largest rank, of a short run."""
    command = [sys.executable, "-c", "from rlinf.cli.main import entry_point; entry_point()", "train", recipe]
    process = subprocess.Popen([*command, "--output", str(folder), *overrides], stdout=subprocess.DEVNULL)
    peaks: dict[str, int] = {}
    while process.poll() is None:
        for worker, pid in _workers(folder):
            peaks[worker] = max(peaks.get(worker, 0), _peak_bytes(pid))
        time.sleep(POLL_S)
    assert process.returncode == 0, f"rlinf train ended with {process.returncode}"
    return peaks


def _workers(folder: Path) -> list[tuple[str, int]]:
    workers = []
    for log in (folder / "logs").glob("*/*.log"):
        first = log.read_text().partition("\n")[0]
        if "process " in first:
            workers.append((log.parent.name, int(first.partition("process ")[2].partition(",")[0])))
    return workers


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def count(config: ReasoningConfig) -> tuple[ModelShape, dict[str, dict[str, int]]]:
    """The model, and worker -> what its largest rank is said to take, by what it is for."""
    job = jobs.prepare(config)
    assert isinstance(job.config, ReasoningConfig)
    alphabet = make_task(job.config.task, job.config.seed).alphabet
    shape = shape_of(job.config, len(character_tokenizer(alphabet or "")))
    assert shape is not None
    flows = job.build(Path("none"))
    plan = plans_by_rule(job, flows, "collocated").plans[flows.train.name]
    counted = {}
    for load in loads_of(job.config, shape, plan):
        parts = {
            "process": load.process - load.peak,
            "weights": load.memory.weights,
            "gradients": load.memory.gradients,
            "optimizer": load.memory.optimizer,
            "work": load.peak - load.memory.state,
            "store": 0 if load.group == "reference" else stored_bytes(shape, job.config),  # mapped, so it is resident
        }
        counted[load.group] = parts
    return shape, counted


def run(case: Case, measured: dict[str, int] | None) -> dict[str, Any]:
    """What is counted beside what is measured, or was."""
    with tempfile.TemporaryDirectory() as scratch:
        overrides = overrides_of(case, Path(scratch))
        config = load_config(case.recipe, parse_overrides(overrides))
        assert isinstance(config, ReasoningConfig), "the recipe's job"
        shape, counted = count(config)
        measured = measured or measure(case.recipe, overrides, Path(scratch) / "run")
        rows = {
            worker: {
                "measured_bytes": measured[worker],
                "counted_bytes": sum(parts.values()),
                "of_it": parts,
                "ratio": round(sum(parts.values()) / measured[worker], 3),
            }
            for worker, parts in counted.items()
        }
        return {
            "about": case.about,
            "num_parameters": shape.num_parameters,
            "workers": rows,
            "process_bytes": measured["reward"],
            "overrides": [part.replace(scratch, "SCRATCH") for part in overrides],
        }


def main() -> None:
    """Counts every case anew, and measures those that the command line names, or all; `--recount` measures none."""
    named = sys.argv[1:] or list(CASES)
    before = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
    cases = {}
    for name in (name for name in CASES if name in named or name in before):
        measured = None
        if name not in named:
            rows = before[name]["workers"].items()
            measured = {worker: row["measured_bytes"] for worker, row in rows}
            measured["reward"] = before[name]["process_bytes"]
        cases[name] = run(CASES[name], measured)
        for worker, row in cases[name]["workers"].items():
            print(f"{name:10} {worker:10} counted {row['counted_bytes'] / 2**20:8.0f} MiB, measured", end=" ")
            print(f"{row['measured_bytes'] / 2**20:8.0f} MiB, ratio {row['ratio']}", flush=True)
    result = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "cases": cases}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

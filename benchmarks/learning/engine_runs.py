"""Does the engine matter? A recipe with every engine and the same seeds: benchmarks/results/learning-engines.json.

    RLINF_VENVS=.venv/venvs python -m benchmarks.learning.engine_runs --seeds 0 1 2
    RLINF_VENVS=.venv/venvs python -m benchmarks.learning.engine_runs --recipe count-shapes-grpo

The recipe is sort-grpo; the result of another has its name, learning-engines-count-shapes-grpo.json. With --add, an
engine at a time can be measured.

A run has one CPU slot, on which trainer and engine take turns; the venvs `sglang` and `vllm` have been created, and the
trainer's venv has transformers. The model is that of the recipe with heads of 32 numbers, the smallest that vLLM
computes on a CPU. Engines take turns within a seed, which has one SFT warm-up. With each run come the scores of its
evaluations, the KL between engine and trainer in its first step and what rounding explains, and times.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.learning.run import earlier_runs, result_of, train

SETTINGS = {
    "model.architecture.hidden_size": 128,
    "cluster.device": "cpu",
    "cluster.num_devices": 1,
    "mode": "collocated",
    "run.max_minutes": "null",
    "run.stop_at_score": "null",
}
OWN: dict[str, dict[str, Any]] = {"sort-grpo": {}, "count-shapes-grpo": {"actor.num_shards": 1}}
"""Further settings of the recipes."""
ENGINES = {"huggingface": {}, "sglang": {"venvs.rollout": "sglang"}, "vllm": {"venvs.rollout": "vllm"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--recipe", choices=sorted(OWN), default="sort-grpo")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--add", action="store_true", help="keep the other runs that the result has already")
    parser.add_argument("--output", type=Path, help="JSON to write instead of benchmarks/results/learning-engines.json")
    options = parser.parse_args()
    name = "learning-engines" if options.recipe == "sort-grpo" else f"learning-engines-{options.recipe}"
    settings = {**SETTINGS, **OWN[options.recipe], "run.num_steps": options.steps}
    whole = {"recipe": options.recipe, **settings}
    runs = earlier_runs(name, whole, [(e, s) for e in options.engines for s in options.seeds]) if options.add else []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in options.seeds:
            for engine in options.engines:
                folder = Path(scratch, f"{engine}-{seed}")
                runs.append(run_of(options.recipe, engine, seed, settings, folder))
                print(runs[-1], flush=True)
                report(  # also if a later run fails
                    name,
                    settings=whole,
                    samples_s={},
                    comparisons=[],
                    findings={"runs": runs},
                    output=options.output,
                )


def run_of(recipe: str, engine: str, seed: int, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    whole = {"seed": seed, "rollout.engine": engine, **settings, **ENGINES[engine]}
    start_s = time.monotonic()
    train(recipe, folder, [part for key, value in whole.items() for part in (f"--{key}", str(value))])
    wall_s = time.monotonic() - start_s
    result, evaluations = result_of(folder)
    (session,) = json.loads((folder / "manifest.json").read_text())["sessions"]
    return {
        "engine": engine,
        "seed": seed,
        "wall_s": wall_s,
        **{key: result[key] for key in ("before", "after", "num_steps", "training_s", "stage_seconds")},
        "first_step": session["agreement"],
        "evaluations": evaluations,
    }


if __name__ == "__main__":
    main()

"""Every algorithm on the sorting job, three seeds each from the same start: held-out accuracy by step.

    python benchmarks/learning/sorting.py [NAME ...] [--seeds 0 1 2]

Writes one JSON a run to benchmarks/results/learning and skips runs whose file is there. A run is `rlinf train sort-grpo
--algorithm.name NAME` with a fixed number of steps and a constant learning rate; what differs from the preset stands in
`CHANGES`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # run as a script
from runs import RESULTS, Run, run_once

NUM_STEPS = 60
COMMON = {
    "run.num_steps": NUM_STEPS,
    "run.max_minutes": "null",
    "run.evaluate_every": 10,
    "run.checkpoint_every": NUM_STEPS,
    "run.stop_at_score": "null",
    "mode": "collocated",
    "actor.lr_decay_steps": "null",
}
CHANGES: dict[str, dict[str, object]] = {
    "grpo": {},
    "dr_grpo": {},
    "ppo": {},
    # room for answers that are too long, so that their penalty has something to do: a right one has 9 tokens
    "dapo": {"rollout.max_new_tokens": 12, "algorithm.overlong_buffer_tokens": 3},
    "rloo": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {},
    "gspo": {},
    "cispo": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CHANGES), help="algorithms; all where none is given")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for name in arguments.names:
            overrides = {"algorithm.name": name, "seed": seed} | COMMON | CHANGES[name]
            run = Run(job="sorting", recipe="sort-grpo", algorithm=name, seed=seed, overrides=overrides)
            with tempfile.TemporaryDirectory() as folder:
                run_once(run, Path(folder) / "run", RESULTS)


if __name__ == "__main__":
    main()

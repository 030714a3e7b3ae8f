"""DSRL: the success of a pi0 after demonstrations, and that of the noise that SAC learns for it while it is frozen.

    python -m benchmarks.learning.dsrl --seeds 0 1 2

For each seed: reach-pi0-ppo up to its first step, of which the score of "before" is pi0's own, with the noise that it
draws; then faucet-pi0-dsrl with that policy. Its score of "before" is that of noise near 0, where the actor begins.
JSON under benchmarks/results. Arguments that this script does not know are overrides of faucet-pi0-dsrl.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.harness import report
from benchmarks.learning.run import result_of, train

RECIPE, WARM_RECIPE = "faucet-pi0-dsrl", "reach-pi0-ppo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args, overrides = parser.parse_known_args()
    runs = []
    for seed in args.seeds:
        started_s, flags = time.monotonic(), ["--seed", str(seed)]
        with tempfile.TemporaryDirectory() as scratch:
            warm, steered = Path(scratch) / "warm", Path(scratch) / "dsrl"
            train(WARM_RECIPE, warm, [*flags, "--run.num_steps", "1"])
            flow = result_of(warm)[0]["before"]
            print(f"seed {seed}: pi0 {flow:.0%}", flush=True)
            folder = warm / "checkpoints" / "step-000001" / "model"
            train(RECIPE, steered, [*flags, "--policy.options.flow_folder", str(folder), *overrides])
            result, evaluations = result_of(steered)
        print(f"seed {seed}: DSRL {evaluations}", flush=True)
        wall_s = time.monotonic() - started_s
        runs.append({"seed": seed, "wall_s": wall_s, "flow": flow, **result, "evaluations": evaluations})
    settings = {"recipe": RECIPE, "warm_recipe": WARM_RECIPE, "overrides": overrides}
    report(f"learning-{RECIPE}", settings=settings, samples_s={}, comparisons=[], findings={"runs": runs})


if __name__ == "__main__":
    main()

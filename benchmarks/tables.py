"""Writes docs/performance.md from the JSON files under benchmarks/results: `python -m benchmarks.tables`."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.algos import report as mathematics
from benchmarks.comm import report as communication
from benchmarks.sched import report as planning
from benchmarks.targets import LearningTarget, RatioTarget, marked

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "docs" / "performance.md"

HEAD = """# Measured results

`python -m benchmarks.tables` writes this page from `benchmarks/results/*.json`, which contain machine, versions,
commit, settings and all samples. `benchmarks/README.md` describes how each was run. What misses its target is marked
**missed**.

Both sides of a comparison alternate in one run, round by round, so the ratios are meaningful and absolute times are
not. *Of medians* is the median time of one side over that of the other; targets are judged by it. *Median over rounds*
is the median of the ratios of single rounds, which is less sensitive to a machine that was slow for a while.
"""

LEARNING = {
    "learning-sort-grpo": "Sorting eight digits, GRPO: greedy accuracy on 500 held-out problems. "
    "Target: from at most 60 % to at least 90 % within 3 minutes",
    "learning-sort-grpo-random-rewards": "The same with random rewards. Target: no improvement",
    "learning-sort-grpo-sglang": "The same job with SGLang in a separate venv. "
    "Target: at least 90 %, three seeds of three",
    "learning-sort-grpo-vllm": "The same with vLLM, and a model with heads of 32",
    "learning-sort-grpo-megatron-sglang": "The same with the model sharded over two slots by megatron-core, until an "
    "evaluation reaches 90 %",
    "learning-sort-grpo-fsdp2-sglang": "The same with fsdp2 on two slots",
    "learning-pushcube-ppo": "PushCube-v1, PPO: success at the end of 100 episodes from held-out reset seeds, "
    "deterministic actions. Target: 80 % within 6 minutes",
    "learning-env-ppo": "CartPole-v1 by the generic recipe env-ppo: mean return of 20 episodes from held-out reset "
    "seeds, at most 500. Target: 450 within 4 minutes",
    "learning-reach-openvla-ppo": "Faucets of Meta-World (docs/demonstrations.md): a tiny OpenVLA by PPO after 20 "
    "demonstrations, success in 50 held-out episodes. Target: from at most 60 % to at least 90 % within 10 minutes",
    "learning-reach-openvla-ppo-random-rewards": "The same with random rewards. Target: no improvement",
    "learning-reach-pi0-ppo": "The same task, a tiny pi0 by Flow-SDE. Target: from at most 60 % to at least 85 %",
    "learning-reach-pi0-ppo-flow-noise": "The same by Flow-Noise",
    "learning-reach-smolvla-ppo": "The same task, a tiny SmolVLA, beside other work. Target: at least 85 %",
    "learning-reach-smolvla-ppo-pi05": "The same with a tiny pi0.5, beside other work. Target: at least 85 %",
    "learning-reach-oft-grpo": "The same task, a tiny OpenVLA-OFT by GRPO. Target: as for pi0",
    "learning-faucet-rlpd": "Opening a faucet by RLPD from ten demonstrations and a reward of success alone: success "
    "in 40 held-out episodes, beside other work",
    "learning-count-shapes-grpo": "Counting shapes of a color in pictures, a tiny Qwen2.5-VL by GRPO: greedy accuracy "
    "on 300 held-out problems, beside other work. Target: from at most 40 % to at least 85 % within 10 minutes",
    "learning-count-shapes-grpo-shuffled-pictures": "The same with the pictures of other problems. Target: no "
    "improvement",
    "learning-chart-read-grpo": "Reading the bar of a color off a chart, by the same model, beside other work: "
    "accuracy on 500 held-out problems",
    "learning-gui-click-grpo": "Clicking a button in a picture of a window, by the same model, beside other work. "
    "Target: as for counting",
    "learning-faucet-pi0-dsrl": "The faucets of reach-pi0-ppo, where SAC learns the noise of a pi0 that has seen 20 "
    "demonstrations (DSRL), from the noise at which its actor begins; beside other work",
}
COMPARISONS = {
    "ray-nodes": "Steps of 0.2 to 0.8 s through Ray on two simulated nodes with two slots each, over the local "
    "launcher on the same two cores; metrics, evaluations and weights are bitwise equal. Ray's own "
    "processes take 0.03 of a core; with Ray items and weights cross the network, with the local launcher shared "
    "memory",
    "overhead-sort": "Overhead of processes, channels, leases and weight syncs: time of a step of sort-grpo as a flow "
    "on one slot over the time of the same work in one process",
    "overhead-pushcube": "The same for pushcube-ppo, with 100 hand-overs per step between env and policy",
    "overhead-pushcube-one-core": "The worst case: the same with every process bound to one core, so that env "
    "and policy evict each other from its caches at every hand-over",
    "trl-comparison-sort": "A GRPO step at the sorting job's size: time of TRL's GRPOTrainer over ours. Both sides in "
    "float32; RLinf with the engine `huggingface` and the backend `replicated` on two slots with a thread each; TRL "
    "with one process, its default generation (transformers, no vLLM), without KL and gradient checkpointing, and one "
    "micro-batch of all 512 completions",
    "trl-comparison-long": "The same with a model ten times as large (2.9M) and completions of 32 tokens, where nine "
    "tenths of our time are matrix products",
    "trl-comparison-pictures": "The same with a tiny Qwen2.5-VL (3.7M) that sees a picture with each of 32 prompts, "
    "with 8 completions of at most 16 tokens for each",
    "trl-comparison-gpu": "The same on one H100 with the shape of Qwen2.5-0.5B and 256 completions of 256 tokens. "
    "RLinf with the engine `huggingface` in bfloat16 and the backend `fsdp2` with float32 weights and `compute_dtype: "
    "bfloat16`, micro-batches of at most 16,384 packed tokens; TRL with bfloat16 weights, `bf16`, its default "
    "generation, and micro-batches of 32 completions",
    "trl-async-sort": "Steps that overlap, at the sorting job's size: time from step to step of TRL's AsyncGRPOTrainer "
    "and of its GRPOTrainer over ours with `max_staleness` 1 and 0. Two cores each: ours and the asynchronous trainer "
    "generate in one process and train in another, a thread each, with samples that are at most a step old; "
    "GRPOTrainer has two threads. TRL's asynchronous trainer generates with transformers here; on GPUs it has vLLM",
    "moves": "What passes between two steps of sort-grpo when rollout and actor change their places: time of a move "
    "over time of a restart. Workers have started in their new places in advance, or start after the old ones have "
    "ended; in the last row the actor stays",
    "refill": "The engine `huggingface` on a CPU: time with static batches over time with continuous batching. "
    "Lengths are log-normal, mean 64, at most 512, and the tokens are the same",
    "sglang-flow": "SGLang on a CPU slot, 64 prompts of 24 tokens and 8 completions of at most 32 each: time per token "
    "of SGLang alone over time per token in the flow",
    "sglang-sync": "Loading weights of Qwen2-1.5B's sizes with 6 layers (1.03 GB in bfloat16) into SGLang on a CPU: "
    "time of SGLang's two methods, which check nothing, over ours, attested. Loading a file from "
    "the page cache is one copy, like ours, but without our digests; a trainer must write the file first",
    "vllm-sync": "The same with vLLM: over ours, attested, a worker's method that reloads tensors in shared memory, a "
    "broadcast of each tensor over gloo with a layerwise reload, as its NCCL transfer does, and `reload_weights` from "
    "the page cache, without and with writing the file",
    "arrival": "Rollout and actor on a CPU slot each, the same distribution of lengths, micro-batches of one group. "
    "First rows: the time at which the actor begins over the time at which the shortest group is complete (`refill` "
    "and granularity 1 with `actor.group_order` `arrival` and `index`; a whole batch). Last rows: whole steps",
    "pipelining": "Env and policy of PushCube: time in sequence over time pipelined in halves",
    "maniskill-pictures": "ManiSkill with a picture of 128 x 128, drawn in software: time of its own environments in "
    "Gymnasium's AsyncVectorEnv over time of the same number of steps in the flow, with two processes each and no "
    "neural network on either side; with the same collision shapes, and with its default settings",
    "libero": "The same for LIBERO with two pictures of 128 x 128; with the same drawing quality and resets, and with "
    "its default settings",
    "ppo-states": "PPO on ManiSkill's states: time of a script with the same settings over time of pushcube-ppo",
}
LEARNING_TARGETS = {
    "learning-sort-grpo": LearningTarget(before=0.6, after=0.9, seconds=180),
    "learning-sort-grpo-sglang": LearningTarget(after=0.9),
    "learning-sort-grpo-vllm": LearningTarget(after=0.9),
    "learning-pushcube-ppo": LearningTarget(after=0.8, seconds=360),
    "learning-env-ppo": LearningTarget(after=450, seconds=240),
    "learning-reach-openvla-ppo": LearningTarget(before=0.6, after=0.9, seconds=600),
    "learning-reach-pi0-ppo": LearningTarget(before=0.6, after=0.85),
    "learning-reach-smolvla-ppo": LearningTarget(after=0.85),
    "learning-reach-smolvla-ppo-pi05": LearningTarget(after=0.85),
    "learning-reach-oft-grpo": LearningTarget(before=0.6, after=0.85),
    "learning-count-shapes-grpo": LearningTarget(before=0.4, after=0.85, seconds=600),
    "learning-gui-click-grpo": LearningTarget(before=0.4, after=0.85, seconds=600),
}
OVERHEAD = RatioTarget(value=1.05, is_limit=True, numerators=("flow",))
PICTURES = RatioTarget(value=0.9)
TRL = RatioTarget(value=1.5)
RATIO_TARGETS: dict[str, Sequence[RatioTarget]] = {
    "ray-nodes": [RatioTarget(value=1.15, is_limit=True)],
    "overhead-sort": [OVERHEAD],
    "overhead-pushcube": [OVERHEAD],
    "overhead-pushcube-one-core": [OVERHEAD],
    "trl-comparison-sort": [TRL],
    "trl-comparison-long": [TRL],
    "trl-comparison-pictures": [TRL],
    "trl-comparison-gpu": [TRL],
    "trl-async-sort": [RatioTarget(value=1.0, numerators=("trl, asynchronous", "trl, synchronous"))],
    "moves": [RatioTarget(value=0.1, is_limit=True, numerators=("move", "rollout moves"))],
    "refill": [RatioTarget(value=1.8, numerators=("batches",))],
    "sglang-flow": [RatioTarget(value=0.95)],
    "sglang-sync": [
        RatioTarget(value=5, numerators=("flattened_bucket",)),
        RatioTarget(value=10, numerators=("from_disk",)),
    ],
    "vllm-sync": [RatioTarget(value=5)],
    "arrival": [RatioTarget(value=1.05, is_limit=True, numerators=("first micro-batch, as they come",))],
    "maniskill-pictures": [PICTURES],
    "libero": [PICTURES],
    "ppo-states": [RatioTarget(value=1.3)],
}


def main() -> None:
    lines = [HEAD, "## Learning", *_learning(), "## Speed", *_comparisons()]
    lines.append("![100 ms of env and policy, pipelined and in sequence](images/pipelining.svg)\n")
    lines += _predicted_arrivals()
    if generation := list(_generation()):
        lines += ["## Generation on a GPU", *generation]
    lines += ["## Failures", *_failures(), "## Communication", *communication.sections(RESULTS, IMAGES)]
    if formulas := list(mathematics.sections(RESULTS)):
        lines += ["## Mathematics", *formulas]
    if plans := list(planning.sections(RESULTS, IMAGES)):
        lines += ["## Planning", *plans]
    lines += ["## Predicted and real steps", *_real_runs()]
    lines += ["## Memory", *_memory()]
    PAGE.write_text("\n".join(map(_wrapped, "\n".join(lines).split("\n"))), encoding="utf-8")
    print(f"written to {PAGE}")


def _wrapped(line: str) -> str:
    """The line, broken at 120 columns unless it is a row of a table or a picture."""
    if line.startswith(("|", "![")):
        return line
    return textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False)


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _learning() -> Iterator[str]:
    for name, title in LEARNING.items():
        if result := _load(name):
            yield f"\n{title} ({_machine(result)}).\n"
            yield "| seed | before | after | training steps | training time |\n|---|---|---|---|---|"
            target = LEARNING_TARGETS.get(name)
            for run in result["findings"]["runs"]:
                seconds = marked(f"{run['training_s']:.0f} s", meets=target is None or target.is_met(run))
                yield (
                    f"| {run['seed']} | {_score(run, 'before')} | {_score(run, 'after')} | {run['num_steps']} "
                    f"| {seconds} |"
                )
    yield ""


def _score(run: dict[str, Any], when: str) -> str:
    return f"{run[when]:.1%}" if run.get("score_is_share", True) else f"{run[when]:.1f}"


def _comparisons() -> Iterator[str]:
    for name, title in COMPARISONS.items():
        if result := _load(name):
            yield f"\n{title} ({_machine(result)}).\n"
            targets = RATIO_TARGETS.get(name, ())
            yield f"| ratio | of medians | median over rounds |{' target |' * bool(targets)}"
            yield f"|---|---|---|{'---|' * bool(targets)}"
            for c in result["comparisons"]:
                sides = f"{c['numerator']} / {c['denominator']}"
                cell = f" {''.join(target.cell(c) for target in targets)} |" * bool(targets)
                yield f"| {sides} | {c['ratio_of_medians']:.3f} | {c['median_of_ratios']:.3f} |{cell}"
    yield ""


def _predicted_arrivals() -> Iterator[str]:
    if not (result := _load("arrival")):
        return
    num_profiled = result["settings"]["rounds_profiled"]
    yield (
        "\nThe planner's prediction from the first half of the steps, compared with that half and the later one. "
        "Target: within 10 %. In order, a long group delays all groups after it, which is not simulated.\n"
    )
    yield "| groups | predicted | steps profiled | error | later steps | error |\n|---|---|---|---|---|---|"
    for name, row in result["findings"]["predictions"].items():
        profiled_s = statistics.median(result["samples_s"][name][:num_profiled])
        error = row["predicted_s"] / profiled_s - 1
        yield (
            f"| {name} | {row['predicted_s']:.2f} s | {profiled_s:.2f} s "
            f"| {_within_tenth(error)} | {row['measured_s']:.2f} s | "
            f"{_within_tenth(row['error'])} |"
        )
    yield ""


def _within_tenth(error: float) -> str:
    return marked(f"{error:+.0%}", meets=abs(error) <= 0.1)


def _generation() -> Iterator[str]:
    if not (result := _load("generation")):
        return
    settings, findings = result["settings"], result["findings"]
    layers, hidden = (settings["shape"][key] for key in ("num_hidden_layers", "hidden_size"))
    yield (
        f"\n{settings['prompts']} prompts of {settings['prompt_tokens']} tokens, {settings['group_size']} completions "
        f"each of {settings['new_tokens']}, by a Qwen2 of {layers} layers and hidden size {hidden} with random weights "
        f"in {settings['dtype']} ({settings['device']}, {result['date'][:10]}): `graphs` is the engine `huggingface` "
        "with default settings, `eager` the same with `cuda_graphs: false`, `generate` transformers' own loop, which "
        "returns no log-probabilities.\n"
    )
    yield "| method, fastest round | tokens a second | time over that of graphs |\n|---|---|---|"
    best_s = {way: min(samples) for way, samples in result["samples_s"].items()}
    ratios = {way: best / best_s["graphs"] for way, best in best_s.items()}
    for way in sorted(ratios, key=lambda way: ratios[way]):
        yield f"| {way} | {findings['tokens_per_s'][way]:,.0f} | {ratios[way]:.2f} |"
    yield "\nLog-probabilities of sampled tokens compared with one forward over prompt and completion, in nats:\n"
    yield "| method, dtype | largest difference | root mean square |\n|---|---|---|"
    for way, errors in findings["log_probabilities"].items():
        yield f"| {way} | {errors['largest']:.2g} | {errors['root_mean_square']:.2g} |"
    if memory := findings["memory_bytes"]:
        counted, reserved = memory["counted"] / 2**20, memory["reserved"] / 2**20
        yield (
            f"\nAfter an onload the first batch takes {findings['capturing_s']:.2f} s more than a later one, because "
            f"its steps are captured. In addition to the weights {counted:,.0f} MiB are counted before a run, and "
            f"{reserved:,.0f} MiB are reserved."
        )
    yield ""


def _soaked(tenths: Sequence[float]) -> float:
    """Growth from the first two tenths to the last two."""
    return statistics.mean(tenths[-2:]) / statistics.mean(tenths[:2]) - 1


def _failures() -> Iterator[str]:
    if result := _load("killed-worker"):
        yield f"\nTime from killing a worker to the end of the run. Target: 5 s ({_machine(result)}).\n"
        yield "| killed | seconds |\n|---|---|"
        for victim, samples in result["samples_s"].items():
            yield f"| {victim} | {max(samples):.2f} |"
        yield ""
    if result := _load("explained"):
        findings = result["findings"]
        yield (
            f"\n{findings['hangs']} hangs of real processes, time from the start of the hanging run to the correct "
            f"explanation: {statistics.median(map(max, result['samples_s'].values())):.1f} s (median), "
            f"{findings['slowest_s']:.1f} s at worst (target: 10 s; {_machine(result)}).\n"
        )
    if result := _load("soak"):
        growth = max(_soaked(held["rss_bytes"]) for held in result["held"].values())
        others = "; ".join(result["problems"]) or "descriptors, threads and shared segments did not grow"
        yield (
            f"\n{result['steps']:,} steps of a tiny job (`tools/soak.sh`): after a warm-up of a tenth of the steps, "
            f"the memory of its processes grew by at most {growth:.2%} (from the first to the last fifth; target: 1 "
            f"%); {others}.\n"
        )
    if result := _load("killed-engine"):
        (samples,), kills = result["samples_s"].values(), result["findings"]["kills"]
        named = sum(kill["names_it"] and not kill["processes_left"] for kill in kills)
        yield (
            f"\nSGLang killed at {len(kills)} moments of a step: the run ended within {max(samples):.2f} s "
            f"(target: 5 s); {named} of {len(kills)} times the error named SGLang and no process was left "
            f"({_machine(result)}).\n"
        )
    if result := _load("killed-simulators"):
        findings = result["findings"]
        alike = "all metrics are" if findings["metrics_are_equal"] else "some metrics are not"
        yield (
            f"\nSimulators killed ({findings['num_killed']}) or stopped ({findings['num_stopped']}) at random "
            f"moments of a run: {alike} bitwise equal to those of an undisturbed run; "
            f"{len(findings['losses_without_a_line'])} losses are missing in the manifest ({_machine(result)}).\n"
        )


def _real_runs() -> Iterator[str]:
    if not (result := _load("sched-real-runs")):
        return
    workloads = result["findings"]["workloads"]
    if pictures := _load("sched-real-runs-pictures"):
        workloads |= pictures["findings"]["workloads"]
    sources = {
        "profile": "from rlinf profile",
        "auto": "from the first steps of mode auto",
        "own": "from its own steps",
    }
    rows = [row for workload in workloads.values() for row in workload["placements"].values()]
    sizes = {source: [abs(row["error"][source]) for row in rows] for source in sources}
    errors = ", ".join(
        f"{text} {statistics.median(sizes[source]):.1%} ({max(sizes[source]):.0%})" for source, text in sources.items()
    )
    yield (
        "\nSteps of the main jobs on two CPU slots, measured and predicted: from probes of the collocated and the "
        "disaggregated placement, from probes of the collocated one alone, and from a profile of the placement's own "
        f"steps. Median (and largest) error: {errors}. Target: 4 % (12 %) from rlinf profile, (25 %) from mode auto's "
        f"first steps ({_machine(result)}).\n"
    )
    yield f"| workload | placement | measured | {' | '.join(sources.values())} |\n|---|---|---|---|---|---|"
    for name, workload in workloads.items():
        for mode, row in workload["placements"].items():
            cells = [f"{row['predicted_s'][s] * 1e3:.0f} ms ({row['error'][s]:+.0%})" for s in sources]
            yield f"| {name} | {mode} | {row['measured_s'] * 1e3:.0f} ms | {' | '.join(cells)} |"
    yield (
        "\nStep of the plan made from the first steps of mode auto over the step of the best placement by rule in the "
        "same run, median over rounds. Target: at most 1.03.\n"
    )
    yield "| workload | chosen | best by rule | chosen / best |\n|---|---|---|---|"
    for name, workload in workloads.items():
        auto = workload["auto"]
        yield f"| {name} | {auto['mode']} | {auto['best_mode']} | {auto['over_best']:.3f} |"
    yield ""


def _memory() -> Iterator[str]:
    if not (result := _load("memory")):
        return
    yield (
        "\nMemory that `rlinf train` counts for a worker process on a CPU slot over its largest resident set in six "
        f"steps (torch {result['torch']}). Target: never below 1. The memory of the process itself and of malloc are "
        "constants that were chosen on these runs; the rest follows from the model's shape.\n"
    )
    yield "| model and task | worker | counted | measured | counted / measured |\n|---|---|---|---|---|"
    for case in result["cases"].values():
        for worker, row in case["workers"].items():
            sizes = " | ".join(f"{row[key] / 2**20:,.0f} MiB" for key in ("counted_bytes", "measured_bytes"))
            size = f"{case['num_parameters'] / 1e6:.1f}M, {case['about']}"
            yield f"| {size} | {worker} | {sizes} | {row['ratio']:.2f} |"
    yield ""


def _machine(result: dict[str, Any]) -> str:
    return f"{result['machine']['processor']}, {result['date'][:10]}"


if __name__ == "__main__":
    main()

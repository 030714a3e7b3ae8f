"""Tokens a second of SGLang through the flow against SGLang by itself: benchmarks/results/engines.json.

    python -m benchmarks.throughput.engines        with the Python of the environment that has SGLang

Both sides sample the same requests with the same server arguments: 64 prompts of 24 tokens, 8 completions each of at
most 32 tokens, with log-probabilities. Through the flow: prompts by a channel to the rollout's process, requests to the
engine's, groups back by a channel. By itself: one call of `sglang.Engine.generate` with all requests in a list. Sampled
lengths differ a little, so what is compared is the time per token. An engine that waits for its turn sleeps. Target:
at least 0.95 of the bare engine's tokens a second.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, interleave, report

from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, StepContext
from rlinf_workers.engines import NoiseKey, SamplingSettings
from rlinf_workers.engines.base import not_begun
from rlinf_workers.engines.sglang.arguments import server_arguments
from rlinf_workers.engines.sglang.loader import LOADER
from rlinf_workers.engines.sglang.requests import request_parameters
from rlinf_workers.models import ModelSettings
from rlinf_workers.roles import Prompt, Rollout, RolloutSettings
from rlinf_workers.testing.architectures import tiny_architecture

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
}
SERVER = {"max_total_tokens": 40_000, "max_running_requests": 512}
STOP_ID = 1
PROMPT_TOKENS = 24
TARGET = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON to write instead of benchmarks/results/engines.json")
    options = parser.parse_args()
    sampling = SamplingSettings(group_size=8, max_new_tokens=32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_architecture("qwen2", folder / "model", **SHAPE)
        prompts = make_prompts(options.prompts)
        bare = BareEngine(model)
        with Executor(cluster=Cluster.cpu_slots(1), log_folder=folder, env_vars=dict(os.environ)) as executor:
            flow = rollout_flow(model, sampling)
            executor.start(flow, plan_for_mode(flow.graph(), Cluster.cpu_slots(1), "collocated"))
            tokens: dict[str, list[int]] = {"flow": [], "bare": []}

            def through_flow(index: int) -> float:
                context = StepContext(step=index, phase="train", seed=1, num_items=len(prompts))
                start_s = time.perf_counter()
                run = executor.run(flow, context=context, feeds={"prompts": prompts})
                spent_s = time.perf_counter() - start_s
                tokens["flow"].append(sum(int(group.loss_mask.sum()) for group in run.collected["samples"]))
                return spent_s / tokens["flow"][-1]

            def by_itself(index: int) -> float:
                start_s = time.perf_counter()
                tokens["bare"].append(bare.generate(prompts, sampling, index))
                return (time.perf_counter() - start_s) / tokens["bare"][-1]

            sides = {"flow": through_flow, "bare": by_itself}
            samples_s = interleave(sides, num_warmup=options.warmup, num_rounds=options.rounds)
        bare.engine.shutdown()
    comparison = compare(samples_s, "bare", "flow")
    report(
        "engines",
        settings={
            "prompts": options.prompts,
            "shape": SHAPE,
            "server": SERVER,
            "target": TARGET,
            "samples": "s a token",
        },
        samples_s=samples_s,
        comparisons=[comparison],
        findings={"meets_target": comparison.ratio_of_medians >= TARGET, "tokens": tokens},
        output=options.output,
    )


class BareEngine:
    """`sglang.Engine` as its users call it."""

    def __init__(self, model: ModelSettings) -> None:
        from sglang import Engine  # pyright: ignore[reportMissingImports]

        self.engine: Any = Engine(
            **server_arguments(
                model,
                torch.device("cpu"),
                num_devices=1,
                folder=model.folder,
                loader=LOADER,
                stop_token_ids=(STOP_ID,),
                engine_options=SERVER,
            )
        )

    def generate(self, prompts: list[Prompt], sampling: SamplingSettings, step: int) -> int:
        """Tokens sampled for a group of each prompt."""
        parameters = [
            request_parameters(request, sampling, (STOP_ID,))
            for prompt in prompts
            for request in not_begun(prompt, sampling.group_size, NoiseKey(seed=1, step=step, index=prompt.index))
        ]
        input_ids = [prompt.token_ids.tolist() for prompt in prompts for _ in range(sampling.group_size)]
        outputs = self.engine.generate(input_ids=input_ids, sampling_params=parameters, return_logprob=True)
        self.engine.flush_cache()  # as a step's new weights do
        return sum(len(output["output_ids"]) for output in outputs)


def rollout_flow(model: ModelSettings, sampling: SamplingSettings) -> Flow:
    settings = RolloutSettings(
        model=model,
        train=sampling,
        evaluate=replace(sampling, temperature=0.0),
        max_prompt_tokens=PROMPT_TOKENS,
        engine="sglang",
        engine_options=dict(SERVER),
    )
    flow = Flow("generate")
    flow.worker("rollout", Rollout, settings)
    flow.stage("rollout", Rollout.generate, reads="prompts", writes="samples")
    return flow


def make_prompts(num_prompts: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(2, SHAPE["vocab_size"], (num_prompts, PROMPT_TOKENS), generator=generator)
    return [Prompt(index=i, token_ids=row, reference_answer="") for i, row in enumerate(rows)]


if __name__ == "__main__":
    main()

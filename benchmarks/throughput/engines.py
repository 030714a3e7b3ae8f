"""Tokens a second of SGLang or vLLM through the flow against the engine by itself: benchmarks/results/ENGINE-flow.json.

    python -m benchmarks.throughput.engines vllm        with the Python of the venv that has the engine

Both sides sample the same requests with the same arguments: 64 prompts of 24 tokens, 8 completions each of at most 32
tokens, with log-probabilities. Through the flow: prompts by a channel to the rollout's process, requests to the
engine's, groups back by a channel. By itself: all requests at once to `sglang.Engine` or `AsyncLLM`. Sampled
lengths differ a little, so what is compared is the time per token. An engine that waits for its turn sleeps. Target:
at least 0.95 of the bare engine's tokens a second.

With vLLM one more side shows what its users have on a CPU and RLinf has not: weights that are arranged for its kernels,
and requests without seeds, whose noise depends on their batch (`unseeded`); with seeds vLLM 0.32.0 ends there when it
computes a prompt in parts.

`sglang --gpu 0.5B` compares on the first GPU instead, with a model of that shape in bfloat16 and completions of at most
256 tokens. Both sides are resident there; the target is 0.9. No GPU has run it yet.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, interleave, report
from benchmarks.sched.gpu_steps import SHAPES, write_model
from benchmarks.throughput.vllm_peer import Peer

from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, StepContext
from rlinf_workers.engines import NoiseKey, SamplingSettings
from rlinf_workers.engines.base import UnfinishedCompletion, not_begun
from rlinf_workers.engines.sglang.arguments import server_arguments
from rlinf_workers.engines.sglang.engine import known_arguments as known_sglang_arguments
from rlinf_workers.engines.sglang.loader import LOADER
from rlinf_workers.engines.sglang.requests import request_parameters as sglang_parameters
from rlinf_workers.engines.vllm.arguments import engine_arguments
from rlinf_workers.engines.vllm.engine import known_arguments
from rlinf_workers.engines.vllm.requests import request_parameters as vllm_parameters
from rlinf_workers.engines.vllm.server import VLLMServer
from rlinf_workers.leftovers import SweptFolder
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
OPTIONS: dict[str, dict[str, Any]] = {
    "sglang": {"max_total_tokens": 40_000, "max_running_requests": 512},
    "vllm": {"kv_cache_memory_bytes": 96 << 20, "max_num_seqs": 512},
}
"""Room for all completions at once, on a CPU slot."""
GPU_OPTIONS = {"max_total_tokens": 160_000, "max_running_requests": 512}
STOP_ID = 1
PROMPT_TOKENS = 24
TARGET, GPU_TARGET = 0.95, 0.9
SAMPLING = SamplingSettings(group_size=8, max_new_tokens=32)
GPU_SAMPLING = replace(SAMPLING, max_new_tokens=256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What both sides serve, and how."""

    model: ModelSettings
    shape: Mapping[str, Any]
    """Of the model."""
    sampling: SamplingSettings
    options: dict[str, Any]
    """Of the engine."""
    cluster: Cluster
    target: float

    @property
    def device(self) -> torch.device:
        return torch.device(self.cluster.devices[0].kind)


def trial_of(engine: str, gpu: str | None, folder: Path) -> Trial:
    """What is compared.

    Args:
        gpu: the shape of the model on the first GPU; None: a tiny one on a CPU slot.
    """
    if gpu is None:
        return Trial(
            model=tiny_architecture("qwen2", folder, **SHAPE),
            shape=SHAPE,
            sampling=SAMPLING,
            options=OPTIONS[engine],
            cluster=Cluster.cpu_slots(1),
            target=TARGET,
        )
    write_model(folder, SHAPES[gpu], "cuda")
    properties = torch.cuda.get_device_properties(0)
    return Trial(
        model=ModelSettings(folder=str(folder), has_weights=True, dtype="bfloat16"),
        shape=SHAPES[gpu],
        sampling=GPU_SAMPLING,
        options=GPU_OPTIONS,
        cluster=Cluster.cuda_nodes(1, 1, name=properties.name, memory_bytes=properties.total_memory),
        target=GPU_TARGET,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("engine", choices=sorted(OPTIONS))
    parser.add_argument("--gpu", choices=sorted(SHAPES), help="sglang: a model of this shape on the first GPU")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON to write instead of benchmarks/results/ENGINE-flow.json")
    options = parser.parse_args()
    if options.gpu and options.engine != "sglang":
        parser.error("--gpu is for sglang")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trial = trial_of(options.engine, options.gpu, folder / "model")
        prompts = make_prompts(options.prompts)
        bare = BARE[options.engine](trial)
        with Executor(cluster=trial.cluster, log_folder=folder, env_vars=dict(os.environ)) as executor:
            flow = rollout_flow(options.engine, trial)
            executor.start(flow, plan_for_mode(flow.graph(), trial.cluster, "collocated"))
            tokens: dict[str, list[int]] = {side: [] for side in ("flow", *bare)}

            def through_flow(index: int) -> int:
                context = StepContext(step=index, phase="train", seed=1, num_items=len(prompts))
                run = executor.run(flow, context=context, feeds={"prompts": prompts})
                return sum(int(group.loss_mask.sum()) for group in run.collected["samples"])

            def side(name: str, generate: Callable[[int], int]) -> Callable[[int], float]:
                def seconds_per_token(index: int) -> float:
                    start_s = time.perf_counter()
                    tokens[name].append(generate(index))
                    return (time.perf_counter() - start_s) / tokens[name][-1]

                return seconds_per_token

            sides = {"flow": side("flow", through_flow)}
            for name, generate in bare.items():
                sides[name] = side(name, lambda index, one=generate: one(list(requests_of(prompts, trial, index))))
            samples_s = interleave(sides, num_warmup=options.warmup, num_rounds=options.rounds)
    comparisons = [compare(samples_s, name, "flow") for name in bare]
    report(
        f"{options.engine}-flow",
        settings={
            "prompts": options.prompts,
            "shape": trial.shape,
            "engine_options": trial.options,
            "target": trial.target,
            "samples": "s a token",
        },
        samples_s=samples_s,
        comparisons=comparisons,
        findings={"meets_target": comparisons[0].ratio_of_medians >= trial.target, "tokens": tokens},
        output=options.output,
    )
    os._exit(0)  # the bare engines' processes end with this one


Generate = Callable[[list[UnfinishedCompletion]], int]
"""Samples requests to their end; returns the number of tokens."""


def requests_of(prompts: list[Prompt], trial: Trial, step: int) -> Iterator[UnfinishedCompletion]:
    """A group of each prompt."""
    for prompt in prompts:
        yield from not_begun(prompt, trial.sampling.group_size, NoiseKey(seed=1, step=step, index=prompt.index))


def bare_sglang(trial: Trial) -> dict[str, Generate]:
    """`sglang.Engine` as its users call it."""
    known_sglang_arguments(trial.device, ("",), any_version=False)  # sets what SGLang reads from the environment
    from sglang import Engine  # pyright: ignore[reportMissingImports]

    engine = Engine(
        **server_arguments(
            trial.model,
            trial.device,
            num_devices=1,
            folder=trial.model.folder,
            loader=LOADER,
            stop_token_ids=(STOP_ID,),
            engine_options=trial.options,
        )
    )

    def generate(requests: list[UnfinishedCompletion]) -> int:
        parameters = [sglang_parameters(one, trial.sampling, (STOP_ID,)) for one in requests]
        input_ids = [one.prompt.token_ids.tolist() for one in requests]
        outputs = engine.generate(input_ids=input_ids, sampling_params=parameters, return_logprob=True)
        engine.flush_cache()  # as a step's new weights do
        return sum(len(output["output_ids"]) for output in outputs)

    return {"bare": generate}


def bare_vllm(trial: Trial) -> dict[str, Generate]:
    """`AsyncLLM` with all requests at once: with the weights as RLinf has them, and with vLLM's own loader."""
    known_arguments(trial.device, ("cpu:0",), any_version=False)
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    arguments = engine_arguments(
        trial.model, trial.device, num_devices=1, folder=trial.model.folder, engine_options=trial.options
    )  # a core process that computes by itself
    own = {"load_format": "dummy", "worker_extension_cls": f"{Peer.__module__}.{Peer.__name__}"}
    servers = [VLLMServer(one, SweptFolder("rlinf-bare-"), print) for one in (arguments, arguments | own)]

    def generate(server: VLLMServer, requests: list[UnfinishedCompletion], **changes: Any) -> int:
        async def one(number: int, request: UnfinishedCompletion) -> int:
            parameters = vllm_parameters(request, trial.sampling, (STOP_ID,)) | changes
            sampling = SamplingParams(**parameters, output_kind=RequestOutputKind.FINAL_ONLY)
            prompt = {"prompt_token_ids": request.prompt.token_ids.tolist()}
            outputs = [output async for output in server.engine.generate(prompt, sampling, str(number))]
            return len(outputs[-1].outputs[0].token_ids)

        async def all_of_them() -> int:
            counts = await asyncio.gather(*(one(number, request) for number, request in enumerate(requests)))
            await server.engine.reset_prefix_cache()  # as a step's new weights do
            return sum(counts)

        return server.run(all_of_them())

    return {
        "bare": lambda requests: generate(servers[0], requests),
        "unseeded": lambda requests: generate(servers[1], requests, seed=None),
    }


BARE = {"sglang": bare_sglang, "vllm": bare_vllm}


def rollout_flow(engine: str, trial: Trial) -> Flow:
    settings = RolloutSettings(
        model=trial.model,
        train=trial.sampling,
        evaluate=replace(trial.sampling, temperature=0.0),
        max_prompt_tokens=PROMPT_TOKENS,
        engine=engine,
        engine_options=dict(trial.options),
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

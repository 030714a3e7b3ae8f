"""Tokens a second of generation on a GPU: benchmarks/results/generation.json.

    python -m benchmarks.throughput.generation

Qwen2.5-0.5B's shape with random weights in bfloat16; 64 prompts of 128 tokens, 8 completions each of 256 tokens. Three
ways take turns:

    graphs      the engine `huggingface` as it is on a GPU
    eager       the same with cuda_graphs=false
    generate    transformers' `model.generate` with the same sampling, which gives no log-probabilities

All sample the full distribution at temperature 1. The first round does not count: graphs are captured in it, and the
others take up to three times as long. Log-probabilities of both engines are compared with those of one forward over
the whole sequences, in bfloat16 and in float32.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, interleave, report

from rlinf_sched.derive import JobShape, Lengths, ModelShape, batch_memory
from rlinf_workers.engines import Completions, HuggingFaceEngine, SamplingSettings
from rlinf_workers.models import ModelSettings
from rlinf_workers.roles import Prompt
from rlinf_workers.testing.architectures import write_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WAYS = ("graphs", "eager", "generate")
NUM_CHECKED, CHECKED_TOKENS = 4, 64
"""Prompts whose log-probabilities are compared, and tokens of each completion."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="graphs is always measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    sampling = SamplingSettings(group_size=options.group_size, max_new_tokens=options.new_tokens)
    checked = replace(sampling, max_new_tokens=min(CHECKED_TOKENS, options.new_tokens))
    prompts = make_prompts(options.prompts, options.prompt_tokens)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), options.layers)
        named = [name for name in ("graphs", "eager") if name in ("graphs", *options.ways)]
        engines = {name: make_engine(model, device, graphs=name == "graphs") for name in named}
        num_tokens: dict[str, list[int]] = {name: [] for name in WAYS}

        def side(name: str, generate: Callable[[int], int]) -> Callable[[int], float]:
            def step(round_index: int) -> float:
                wait(device)
                began = time.perf_counter()
                generated = generate(round_index)
                wait(device)
                num_tokens[name].append(generated)
                return time.perf_counter() - began

            return step

        sides = {
            name: side(name, lambda step, e=engine: count(run(e, prompts, sampling, step)))
            for name, engine in engines.items()
        }
        if "generate" in options.ways:
            sides["generate"] = side("generate", lambda _: peer(engines["graphs"], prompts, sampling, device))
        samples_s = interleave(sides, num_warmup=1, num_rounds=options.rounds)
        rates = {
            name: [generated / seconds for generated, seconds in zip(num_tokens[name][1:], samples, strict=True)]
            for name, samples in samples_s.items()
        }
        findings: dict[str, Any] = {
            "tokens_per_s": {name: sorted(rate)[len(rate) // 2] for name, rate in rates.items()}
        }
        findings["capturing_s"] = capturing_s(engines["graphs"], prompts, sampling, device)
        findings["token_s_of_one_prompt"] = token_s(engines["graphs"], prompts[:1], sampling, device)
        findings["memory_bytes"] = memory_of(engines["graphs"], prompts, sampling, device)
        findings["log_probabilities"] = {
            f"{name}, {str(dtype).removeprefix('torch.')}": differences(engine, prompts[:NUM_CHECKED], checked, dtype)
            for dtype in (torch.bfloat16, torch.float32)
            for name, engine in engines.items()
        }
    for name, finding in findings.items():
        print(name, finding)
    report(
        "generation",
        settings={
            "prompts": options.prompts,
            "prompt_tokens": options.prompt_tokens,
            "group_size": options.group_size,
            "new_tokens": options.new_tokens,
            "dtype": "bfloat16",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "shape": SHAPE | {"num_hidden_layers": options.layers},
        },
        samples_s=samples_s,
        comparisons=[compare(samples_s, other, "graphs") for other in samples_s if other != "graphs"],
        findings=findings,
        output=options.output,
    )


def write_model(folder: Path, num_layers: int) -> ModelSettings:
    from transformers import Qwen2Config

    write_tokenizer(folder)
    shape: dict[str, Any] = SHAPE | {"num_hidden_layers": num_layers}
    Qwen2Config(**shape).save_pretrained(folder)
    return ModelSettings(folder=str(folder), has_weights=False, dtype="bfloat16")


def make_prompts(number: int, num_tokens: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(2, SHAPE["vocab_size"], (number, num_tokens), generator=generator)
    return [Prompt(index=i, token_ids=row, reference_answer="") for i, row in enumerate(rows)]


@torch.no_grad()
def make_engine(model: ModelSettings, device: torch.device, *, graphs: bool) -> HuggingFaceEngine:
    with device:  # or the host draws half a billion weights
        engine = HuggingFaceEngine(
            model, device, max_prompt_tokens=None, max_batch_sequences=1 << 16, cuda_graphs=graphs
        )
    engine.onload()
    engine.weights()["model.norm.weight"].mul_(4)  # or all tokens are about as likely as each other
    return engine


def run(
    engine: HuggingFaceEngine, prompts: Sequence[Prompt], sampling: SamplingSettings, step: int
) -> list[Completions]:
    engine.submit(prompts, sampling, seed=1, step=step)
    return engine.finished()


def count(completions: Sequence[Completions]) -> int:
    return int(sum(part.loss_mask.sum() for part in completions))


@torch.no_grad()
def peer(engine: HuggingFaceEngine, prompts: Sequence[Prompt], sampling: SamplingSettings, device: torch.device) -> int:
    """transformers' own loop over the same model; returns the number of tokens."""
    ids = torch.stack([prompt.token_ids for prompt in prompts]).to(device)
    sequences = engine._model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=sampling.group_size,
        max_new_tokens=sampling.max_new_tokens,
    )
    return int((sequences[:, ids.shape[1] :] != SHAPE["pad_token_id"]).sum())


def capturing_s(
    engine: HuggingFaceEngine, prompts: Sequence[Prompt], sampling: SamplingSettings, device: torch.device
) -> float:
    """Seconds that a batch takes longer after the weights have left the device and come back."""
    seconds = []
    for leaves in (True, False):
        if leaves:
            engine.offload()
            engine.onload()
        wait(device)
        began = time.perf_counter()
        run(engine, prompts, sampling, 0)
        wait(device)
        seconds.append(time.perf_counter() - began)
    return seconds[0] - seconds[1]


def token_s(
    engine: HuggingFaceEngine, prompts: Sequence[Prompt], sampling: SamplingSettings, device: torch.device
) -> float:
    """Seconds that each row's next token takes, the prefill shared out among them; once captured."""
    run(engine, prompts, sampling, 0)
    wait(device)
    began = time.perf_counter()
    run(engine, prompts, sampling, 0)
    wait(device)
    return (time.perf_counter() - began) / sampling.max_new_tokens


def memory_of(
    engine: HuggingFaceEngine, prompts: Sequence[Prompt], sampling: SamplingSettings, device: torch.device
) -> dict[str, int] | None:
    """Bytes that the device holds at most for a batch beside the weights: as counted before a run, as allocated, and
    as reserved from the device; None without one."""
    if device.type != "cuda":
        return None
    engine.offload()
    engine.onload()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    run(engine, prompts, sampling, 0)
    lengths = Lengths(
        mean_tokens=sampling.max_new_tokens,
        limit_tokens=sampling.max_new_tokens,
        prompt_tokens=len(prompts[0].token_ids),
        group_size=sampling.group_size,
    )
    shape = ModelShape.from_config(engine._model.config.to_dict())
    counted = batch_memory(shape, JobShape(lengths=lengths, num_groups=len(prompts), dtype_bytes=2))
    return {
        "counted": counted.work(len(prompts)),
        "allocated": torch.cuda.max_memory_allocated(device) - before[0],
        "reserved": torch.cuda.max_memory_reserved(device) - before[1],
    }


@torch.no_grad()
def differences(
    engine: HuggingFaceEngine, prompts: Sequence[Prompt], sampling: SamplingSettings, dtype: torch.dtype
) -> dict[str, float]:
    """Of the engine's log-probabilities from those of a forward over prompt and completion, in nats."""
    engine.offload()
    for parameter in engine._model.parameters():  # `Module.to` would round the rotation's frequencies too
        parameter.data = parameter.data.to(dtype)
    engine.onload()
    part_errors = []
    for part, prompt in zip(run(engine, prompts, sampling, 0), prompts, strict=True):
        completions = part.token_ids.to(engine._device)
        whole = torch.cat([prompt.token_ids.to(engine._device).expand(len(completions), -1), completions], 1)
        logits = engine._model(input_ids=whole, logits_to_keep=completions.shape[1] + 1).logits[:, :-1]
        expected = logits.float().log_softmax(-1).gather(-1, completions[:, :, None])[:, :, 0].cpu()
        part_errors.append((part.logprobs - expected)[part.loss_mask.bool()].double())
    errors = torch.cat(part_errors)
    return {
        "largest": float(errors.abs().max()),
        "root_mean_square": float(errors.pow(2).mean().sqrt()),
        "mean": float(errors.mean()),
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()

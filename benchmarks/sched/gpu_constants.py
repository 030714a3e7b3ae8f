"""Constants of derived profiles, measured on one GPU: results/gpu-constants.json.

    python -m benchmarks.sched.gpu_constants [--gpu H100]

Llama-2-7B's shape with random weights in bfloat16, computed by transformers and torch alone:

    eager       decoding with a cache that grows, as a policy such as OpenVLA decodes its action tokens: seconds of a
                layer (`EAGER_LAYER_S`), and the prefill before it as a share of the peak arithmetic
                (`DENSE_UTILISATION`)
    graph       the same step captured, with a cache of one size: share of the memory's rate
                (`BANDWIDTH_UTILISATION`), and what a layer takes beside it (`CAPTURED_LAYER_S`)
    training    forward and backward with recomputation, and the forward pass alone: share of the peak arithmetic, of
                which recomputation is no part

The datasheet's rates are those of `rlinf_sched.derive.datasheets`. `--tiny` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import report

from rlinf_sched.derive import Gpu, ModelShape, find_gpu

LLAMA_2_7B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = LLAMA_2_7B | {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
PROMPT_TOKENS, NEW_TOKENS = 290, 16
CACHE_TOKENS = 256
"""OpenVLA sees 256 patches and some 30 words of an instruction. The cache of a captured step has room
for what all its rounds generate."""


def seconds(step: Callable[[], Any], *, rounds: int = 5, warmup: int = 2) -> float:
    """Median seconds of a step, of which the device is done."""
    taken = []
    for _ in range(warmup + rounds):
        wait()
        began = time.perf_counter()
        step()
        wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[warmup:])


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def eager(model: Any, shape: ModelShape, gpu: Gpu, device: str, batch: int) -> dict[str, float]:
    """A prefill and decode steps with a cache that grows."""
    prompt = torch.randint(0, shape.vocab_size, (batch, PROMPT_TOKENS), device=device)
    token = prompt[:, :1]

    def prefill() -> Any:
        return model(input_ids=prompt, use_cache=True, logits_to_keep=1).past_key_values

    def both() -> None:
        cache = prefill()
        for _ in range(NEW_TOKENS):
            model(input_ids=token, past_key_values=cache, use_cache=True)

    prefill_s = seconds(prefill)
    token_s = (seconds(both, rounds=3, warmup=1) - prefill_s) / NEW_TOKENS
    flops = batch * PROMPT_TOKENS * shape.forward_flops(PROMPT_TOKENS / 2)
    return {
        "prefill_s": prefill_s,
        "prefill_utilisation": flops / prefill_s / gpu.flops_per_s,
        "token_s": token_s,
        "layer_s": token_s / shape.num_layers,
    }


@torch.no_grad()
def captured(model: Any, shape: ModelShape, gpu: Gpu, device: str, batch: int) -> dict[str, float]:
    """One decode step over a cache of one size, in a CUDA graph; on a CPU, without one."""
    from transformers import StaticCache

    length = PROMPT_TOKENS + CACHE_TOKENS  # attended to as a whole, as the mask leaves nothing out
    cache = StaticCache(config=model.config, max_cache_len=length)
    prompt = torch.randint(0, shape.vocab_size, (batch, PROMPT_TOKENS), device=device)
    model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = prompt[:, :1].contiguous()
    position = torch.full((batch, 1), PROMPT_TOKENS, device=device)
    mask = torch.zeros(batch, 1, 1, length, dtype=torch.bfloat16, device=device)

    def step() -> Any:
        return model(
            input_ids=token, position_ids=position, attention_mask=mask, past_key_values=cache, use_cache=True
        ).logits

    if device == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    token_s = seconds(lambda: [step() for _ in range(NEW_TOKENS)]) / NEW_TOKENS
    looked_up = shape.vocab_size * shape.hidden_size
    num_bytes = 2 * (shape.num_parameters - looked_up) + batch * length * shape.kv_bytes_per_token
    least_s = num_bytes / gpu.memory_bytes_per_s
    return {
        "token_s": token_s,
        "of_memory_rate": least_s / token_s,
        "beside_s_per_layer": (token_s - least_s) / shape.num_layers,
    }


def training(model: Any, shape: ModelShape, gpu: Gpu, device: str, batch: int, length: int) -> dict[str, float]:
    """Forward and backward of a mean over log-probabilities, and the forward pass alone."""
    tokens = torch.randint(0, shape.vocab_size, (batch, length), device=device)
    flops = batch * length * shape.forward_flops(length / 2)

    def loss() -> torch.Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def forward() -> None:
        loss()

    def train() -> None:
        loss().backward()

    forward_s = seconds(forward, rounds=3, warmup=1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    train_s = seconds(train, rounds=3, warmup=1)
    return {
        "forward_s": forward_s,
        "forward_utilisation": flops / forward_s / gpu.flops_per_s,
        "train_s": train_s,
        "train_utilisation": 3 * flops / train_s / gpu.flops_per_s,
        "train_arithmetic_utilisation": 4 * flops / train_s / gpu.flops_per_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="H100", help="a product that the planner has a datasheet of")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, LlamaConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu, config = find_gpu(options.gpu), TINY if options.tiny else LLAMA_2_7B
    shape = ModelShape.from_config(config)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=torch.bfloat16)
    model.eval()
    findings: dict[str, Any] = {}
    for batch in (1, 16, 72):
        findings[f"eager, batch {batch}"] = eager(model, shape, gpu, device, batch)
        findings[f"graph, batch {batch}"] = captured(model, shape, gpu, device, batch)
    batch, length = (1, 64) if options.tiny else (4, 4096)
    findings["training, 4 x 4096 tokens"] = training(model, shape, gpu, device, batch, length)
    for name, finding in findings.items():
        print(name, finding)
    report(
        "gpu-constants",
        settings={
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "gpu": gpu.name,
            "shape": config,
        },
        samples_s={},
        comparisons=[],
        findings=findings,
        output=options.output,
    )


if __name__ == "__main__":
    main()

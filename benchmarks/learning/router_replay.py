"""Router replay of a tiny Qwen3-MoE, with and without: benchmarks/results/router-replay.json.

    python -m benchmarks.learning.router_replay

The engine `huggingface` samples with a mixture of experts in float32 and records its experts. A trainer computes the
log-probabilities of these tokens, with the engine's experts and with those that its own routers choose. It has the same
weights, or its routers are moved by noise, or it computes in bfloat16. For each: the share of tokens whose experts are
the engine's in every layer, what the routers choose by themselves, and how far its log-probabilities are from the
engine's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import report
from torch import Tensor

from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.models.language_model import ModelSettings, load_model
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.routers import routers_of
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles.language.rollout import OpenGroups
from rlinf_workers.roles.records.language import Prompt, SampleGroup
from rlinf_workers.testing.architectures import tiny_architecture

CPU = torch.device("cpu")
NUM_PROMPTS, GROUP_SIZE, NUM_TOKENS = 8, 8, 64
MODELS = {
    "8 experts, 2 used": {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4},
    "64 experts, 8 used": {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 4},
}
TRAINERS = {
    "float32, the same weights": ("float32", 0.0),
    "float32, routers moved by 0.002": ("float32", 0.002),
    "float32, routers moved by 0.02": ("float32", 0.02),
    "float32, routers moved by 0.1": ("float32", 0.1),
    "bfloat16, the same weights": ("bfloat16", 0.0),
}
"""dtype, standard deviation of the noise."""


def sampled(settings: ModelSettings) -> list[SampleGroup]:
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(
            index=index,
            token_ids=torch.randint(2, 13, (4 + index,), generator=generator),
            reference_answer="",
        )
        for index in range(NUM_PROMPTS)
    ]
    engine = HuggingFaceEngine(load_model(settings), CPU, max_prompt_tokens=4 + NUM_PROMPTS)
    sampling = SamplingSettings(group_size=GROUP_SIZE, max_new_tokens=NUM_TOKENS, records_experts=True)
    engine.submit(prompts, sampling, seed=0, step=0)
    groups = OpenGroups(GROUP_SIZE)
    groups.open(prompts)
    return groups.add(engine.finished())


@contextmanager
def used_experts(model: Any) -> Iterator[list[Tensor]]:
    """Yields the experts of each router's call, [N, k], sorted."""
    used: list[Tensor] = []

    def note(_module: Any, _inputs: Any, outputs: Any) -> None:
        used.append(outputs[2].sort(-1).values)

    handles = [router.register_forward_hook(note) for router in routers_of(model)]
    try:
        yield used
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def compared(
    settings: ModelSettings, groups: Sequence[SampleGroup], *, replays: bool, dtype: str, noise: float
) -> dict[str, float]:
    """One trainer beside the engine."""
    kind = TokenModel(replace(settings, dtype=dtype), 1.0, replays_routers=replays)
    model: Any = kind.build(CPU)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight += noise * torch.randn(weight.shape, generator=generator)
    batch = pack_without_padding(groups)
    assert batch.experts is not None
    with used_experts(model) as used:
        outputs = kind.answers(model, batch, entropies=False)
    theirs = batch.experts.long().sort(-1).values.unbind(1)
    agree = torch.stack([(one == other).all(-1) for one, other in zip(used, theirs, strict=True)]).all(0)
    mask = batch.loss_mask != 0
    sampled_logprobs = torch.cat([group.rollout_logprobs[:, : mask.shape[1]] for group in groups])[mask]
    gaps = outputs.logprobs[mask].double() - sampled_logprobs.double()
    row = {
        "tokens_with_the_engines_experts": float(agree.double().mean()),
        "largest_gap_nats": float(gaps.abs().max()),
        "mean_gap_nats": float(gaps.abs().mean()),
        "kl_nats": float((gaps.exp() - 1 - gaps).mean()),
    }
    if replays:
        row["choices_of_own_routers"] = float(outputs.router_agreement)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    findings: dict[str, Any] = {}
    for name, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            settings = tiny_architecture("qwen3_moe", Path(folder), **sizes)
            groups = sampled(settings)
            findings[name] = {"num_tokens": sum(int(group.loss_mask.sum()) for group in groups), "trainers": {}}
            for trainer, (dtype, noise) in TRAINERS.items():
                rows = {
                    side: compared(settings, groups, replays=side == "with replay", dtype=dtype, noise=noise)
                    for side in ("with replay", "without")
                }
                findings[name]["trainers"][trainer] = rows
                for side, row in rows.items():
                    print(f"{name}; {trainer}; {side}:", " ".join(f"{key} {value:.3g}" for key, value in row.items()))
    report(
        "router-replay",
        settings={"models": MODELS, "trainers": TRAINERS, "num_prompts": NUM_PROMPTS, "group_size": GROUP_SIZE,
                  "max_new_tokens": NUM_TOKENS},
        samples_s={}, comparisons=[], findings=findings, output=chosen.output,
    )  # fmt: skip


if __name__ == "__main__":
    main()

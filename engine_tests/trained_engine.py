"""A model whose weights change in this process, and SGLang or vLLM, which serves it; tests and benchmarks share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlinf_comm.weights import Layout, reshard_plan, specs_of
from rlinf_workers.engines import SamplingSettings
from rlinf_workers.engines.serving import ServingEngine
from rlinf_workers.engines.sglang.engine import SGLangEngine
from rlinf_workers.engines.vllm.engine import VLLMEngine
from rlinf_workers.models.language_model import ModelSettings, build_model
from rlinf_workers.roles import Prompt
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.weight_sync.base import Check, FinishReads, WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

EDGE = "actor -> rollout"
LOGPROB_BOUND = 1e-5
"""Nats between the engine's log-probability of a token and that of transformers."""
SIZES: dict[str, dict[str, Any]] = {
    "sglang": {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16},
    "vllm": {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32},
}
"""SGLang pads what its kernels on a CPU cannot cut, which divides 64; vLLM's attention there wants heads of 32."""
CACHES: dict[str, dict[str, Any]] = {
    "sglang": {"max_total_tokens": 2000},
    "vllm": {"kv_cache_memory_bytes": 32 << 20},
}
PROMPTS = [
    Prompt(index=i, token_ids=torch.tensor(ids), reference_answer="")
    for i, ids in enumerate([[3, 7, 5, 8, 10], [4], [9, 2, 11]])
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchVerdict:
    """Greedy completions of an engine beside those of transformers with the same weights."""

    num_tokens: int
    """That the engine has made."""
    num_other: int
    """Completions that are not those of transformers."""
    worst_distance: float
    """Nats, the largest over the tokens, between the engine's log-probability and that of a plain forward."""

    @property
    def holds(self) -> bool:
        return self.num_tokens > 0 and self.num_other == 0 and self.worst_distance <= LOGPROB_BOUND


def make_engine(name: str, settings: ModelSettings, tp: int) -> SGLangEngine | VLLMEngine:
    kind, devices = {"sglang": SGLangEngine, "vllm": VLLMEngine}[name], [f"cpu:{i}" for i in range(tp)]
    return kind(settings, torch.device("cpu"), max_prompt_tokens=8, devices=devices, **CACHES[name])


class TrainedEngine:
    """Weights that change at random in this process, and go to an engine by the sync of shared memory.

    Args:
        name: an architecture of `tiny_architecture`.
        tp: processes over which the engine cuts the model.
        engine: sglang or vllm.
        sizes: what differs from SIZES.
    """

    def __init__(self, name: str, folder: Path, *, tp: int = 1, engine: str = "sglang", **sizes: Any) -> None:
        settings = tiny_architecture(name, folder, **SIZES[engine] | sizes)
        self.model = build_model(settings, torch.device("cpu"))
        self.weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.engine = make_engine(engine, settings, tp)
        specs = specs_of(self.weights)
        self.layout = self.engine.layout().with_dtypes_of(specs)
        reshard = reshard_plan(Layout.replicated(specs, 1), self.layout)
        self.sync = SharedWeightSync(EDGE, reshard)

        def port(side: Any, rank: int) -> WeightPort:
            return WeightPort(
                edge=EDGE, side=side, rank=rank, reshard=reshard, weight_sync="shared", address=self.sync.address
            )

        self.sender = SharedWeightSync.open_sender(port("send", 0))
        self.receiver = self.engine.open_receiver([port("receive", rank) for rank in range(tp)])
        self.version = 0
        self._scale = 1.6 / self.model.config.hidden_size**0.5
        """Of the weights: logits of a size whose rounding is far below the bound, whatever the width."""
        self._finish_reads: FinishReads | None = None

    def publish(self) -> None:
        """The next version: other numbers in every tensor, lent where they lie."""
        self.finish_reads()
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for tensor in self.weights.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * self._scale + (tensor.dim() == 1))
        self._finish_reads = self.sender.publish(self.weights, self.version)

    def finish_reads(self) -> None:
        """What is published is in the sync's memory from now on, if the engine has not taken it yet."""
        if self._finish_reads is not None:
            self._finish_reads()

    def fill(self) -> Check:
        """The engine takes the version; what this returns is the check."""
        check = self.receiver.receive({}, self.version)
        assert check is not None, "an engine's weights are checked after they came"
        return check

    def close(self) -> None:
        self.engine.close()

    def serve(self) -> None:
        """A correct sync of other weights."""
        self.publish()
        self.fill()()
        self.engine.weights_received(self.version)

    def compare_tokens(self, prompts: Sequence[Prompt] = PROMPTS, max_new_tokens: int = 8) -> MismatchVerdict:
        return compare_tokens(self.engine, self.model, self.version or -1, prompts, max_new_tokens)


@torch.no_grad()
def compare_tokens(
    engine: ServingEngine, model: Any, version: int, prompts: Sequence[Prompt] = PROMPTS, max_new_tokens: int = 8
) -> MismatchVerdict:
    """Greedy completions of the engine against transformers' own `generate` and a plain forward.

    Args:
        version: of the weights that the engine serves.
    """
    greedy = SamplingSettings(group_size=1, max_new_tokens=max_new_tokens, temperature=0.0)
    engine.submit(prompts, greedy, seed=1, step=0)
    missing = {prompt.index: prompt.token_ids for prompt in prompts}
    num_tokens, num_other, worst = 0, 0, 0.0
    while missing:
        for part in engine.finished():
            assert part.policy_version == version, "completions of weights that are not served any more"
            ids = missing.pop(part.index)
            tokens = part.token_ids[0][part.loss_mask[0].bool()]
            sequence = model.generate(
                ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False, max_new_tokens=max_new_tokens
            )
            num_tokens += len(tokens)
            num_other += tokens.tolist() != sequence[0, len(ids) :].tolist()
            logits = model(torch.cat([ids, tokens])[None]).logits[0, len(ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            worst = max(worst, float((part.logprobs[0, : len(tokens)] - expected).abs().max()))
    return MismatchVerdict(num_tokens=num_tokens, num_other=num_other, worst_distance=worst)

"""A model whose weights change in this process, and SGLang or vLLM, which serves it; tests and benchmarks share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_comm.weights import Layout, reshard_plan, specs_of
from rlinf_comm.weights.layouts import LORA_A, LORA_B, is_adapter_tensor
from rlinf_workers.engines import SamplingSettings
from rlinf_workers.engines.picture_places import picture_places
from rlinf_workers.engines.serving import ServingEngine
from rlinf_workers.engines.sglang.engine import SGLangEngine
from rlinf_workers.engines.vllm.engine import VLLMEngine
from rlinf_workers.execution.frozen_weights import FROZEN_VERSION
from rlinf_workers.models.language_model import ModelSettings, build_model, load_model
from rlinf_workers.models.lora import find_targets
from rlinf_workers.models.lora_settings import LoraSettings
from rlinf_workers.models.pictures import VISION_LANGUAGE, rope_positions, seen
from rlinf_workers.roles import Prompt
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.pictures import tiny_vision_language
from rlinf_workers.weight_sync.base import Check, FinishReads, SyncedTensors, WeightPort
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
    return kind(settings, torch.device("cpu"), max_prompt_tokens=48, devices=devices, **CACHES[name])


class _Edge:
    """A sync of some tensors by shared memory, from this process to an engine."""

    def __init__(
        self,
        source: Layout,
        served: Layout,
        tensors: Mapping[str, Tensor],
        kind: SyncedTensors,
        engine: ServingEngine,
        num_processes: int,
    ) -> None:
        self.tensors = tensors
        reshard = reshard_plan(source, served)
        self._sync = SharedWeightSync(EDGE, reshard)

        def port(side: Any, rank: int) -> WeightPort:
            return WeightPort(
                edge=EDGE,
                side=side,
                rank=rank,
                reshard=reshard,
                weight_sync="shared",
                address=self._sync.address,
                tensors=kind,
            )

        self.sender = SharedWeightSync.open_sender(port("send", 0))
        self._receiver = engine.open_receiver([port("receive", rank) for rank in range(num_processes)])
        self._finish_reads: FinishReads | None = None

    def publish(self, version: int) -> None:
        self._finish_reads = self.sender.publish(self.tensors, version)

    def finish_reads(self) -> None:
        if self._finish_reads is not None:
            self._finish_reads()

    def fill(self, version: int) -> Check:
        check = self._receiver.receive({}, version)
        assert check is not None, "an engine's weights are checked after they came"
        return check


class TrainedEngine:
    """Weights that change at random in this process, and go to an engine by the sync of shared memory.

    Args:
        name: an architecture of `tiny_architecture` or `tiny_vision_language`.
        tp: processes over which the engine cuts the model.
        engine: sglang or vllm.
        adapter: of the model, whose other weights are frozen then; its targets as in a recipe.
        sizes: what differs from SIZES.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        tp: int = 1,
        engine: str = "sglang",
        adapter: LoraSettings | None = None,
        **sizes: Any,
    ) -> None:
        if name in VISION_LANGUAGE:
            own = SIZES[engine]
            settings = tiny_vision_language(
                name, folder, head_dim=own["head_dim"], intermediate_size=own["intermediate_size"]
            )
        else:
            settings = tiny_architecture(name, folder, **SIZES[engine] | sizes)
        if adapter is not None:
            adapter = replace(adapter, targets=find_targets(settings.folder, adapter.targets)[0])
        self._settings = settings = replace(settings, adapter=adapter)
        self.loaded = load_model(settings)
        self.model = self.loaded.model
        self.weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self._tp = tp
        self.engine = make_engine(engine, settings, tp)
        specs = specs_of(self.weights)
        self.layout = self.engine.layout().with_dtypes_of(specs)
        self.trained = dict(self.weights)
        """Tensors that a version changes."""
        self._frozen: _Edge | None = None
        self.version = 0
        self._generator = torch.Generator().manual_seed(1)
        self._scale = 1.6 / self.model.config.get_text_config().hidden_size ** 0.5
        """Of the weights: logits of a size whose rounding is far below the bound, whatever the width."""
        if adapter is not None:
            self.trained = {name: tensor for name, tensor in self.weights.items() if is_adapter_tensor(name)}
            self._frozen = self._open("frozen")
        self._edge = self._open("all" if adapter is None else "trained")

    def _open(self, tensors: SyncedTensors) -> _Edge:
        is_frozen = tensors == "frozen"
        own = {name: one for name, one in self.weights.items() if (name not in self.trained) == is_frozen}
        served = self.layout.only(own)
        return _Edge(Layout.replicated(served.specs, 1), served, own, tensors, self.engine, self._tp)

    def publish(self, *, frozen: bool = False) -> None:
        """The next version: other numbers in every tensor that changes, lent where they lie. Before the first version
        the engine has taken frozen weights.

        Args:
            frozen: other frozen weights instead, on a new edge.
        """
        self.finish_reads()
        if frozen:
            self._frozen = self._open("frozen")
        elif self._frozen is not None and not self.version:
            self.freeze()
        edge = self._edge_of(frozen=frozen)
        self.version += not frozen
        for tensor in edge.tensors.values():
            noise = torch.randn(tensor.shape, generator=self._generator)
            tensor.copy_(noise * self._scale + (tensor.dim() == 1))
        edge.publish(FROZEN_VERSION if frozen else self.version)

    def finish_reads(self) -> None:
        """What is published is in the sync's memory from now on, if the engine has not taken it yet."""
        for edge in (self._frozen, self._edge):
            if edge is not None:
                edge.finish_reads()

    def fill(self, *, frozen: bool = False) -> Check:
        """The engine takes the version; what this returns is the check."""
        return self._edge_of(frozen=frozen).fill(FROZEN_VERSION if frozen else self.version)

    def freeze(self) -> None:
        """A correct sync of other frozen weights."""
        self.publish(frozen=True)
        self.fill(frozen=True)()

    def _edge_of(self, *, frozen: bool) -> _Edge:
        edge = self._frozen if frozen else self._edge
        assert edge is not None, "only a model with an adapter has frozen weights"
        return edge

    def close(self) -> None:
        self.engine.close()

    def serve(self) -> None:
        """A correct sync of other weights."""
        self.publish()
        self.fill()()
        self.engine.weights_received(self.version)

    def compare_tokens(self, prompts: Sequence[Prompt] = PROMPTS, max_new_tokens: int = 8) -> MismatchVerdict:
        return compare_tokens(self.engine, self.merged_model(), self.version or -1, prompts, max_new_tokens)

    @torch.no_grad()
    def merged_model(self) -> Any:
        """Of transformers, with the adapter merged into its weights if there is one."""
        if self._settings.adapter is None:
            return self.model
        merged = build_model(self._settings, torch.device("cpu"))
        for name, parameter in merged.named_parameters():
            parameter.copy_(self.weights[name])
            layer = name.removesuffix(".weight")
            if layer + LORA_A in self.weights:
                update = self.weights[layer + LORA_B] @ self.weights[layer + LORA_A]
                parameter.add_(update, alpha=self._settings.adapter.scale)
        return merged


def plain_logits(model: Any, prompt: Prompt, tokens: Tensor) -> Tensor:
    """[T, V] before each of the tokens after a prompt, in one forward pass of transformers."""
    ids = torch.cat([prompt.token_ids, tokens])
    if model.config.model_type not in VISION_LANGUAGE:
        return model(ids[None]).logits[0, len(prompt.token_ids) - 1 : -1]
    places = torch.zeros(len(ids), dtype=torch.bool)
    for begin, length in picture_places(prompt):
        places[begin : begin + length] = True
    positions = rope_positions(prompt.pictures, len(ids))[:, None]
    if not hasattr(model.model, "get_rope_index"):
        positions = positions[0]
    with seen(model, [prompt.pictures], places) as arguments:
        logits = model(ids[None], position_ids=positions, **arguments).logits
    return logits[0, len(prompt.token_ids) - 1 : -1]


def greedy_tokens(model: Any, prompt: Prompt, max_new_tokens: int) -> list[int]:
    """The likeliest tokens after a prompt, each from a plain forward pass; to the end token."""
    tokens, end = torch.zeros(0, dtype=torch.int64), model.generation_config.eos_token_id
    while len(tokens) < max_new_tokens and end not in tokens:
        following = torch.cat([tokens, torch.zeros(1, dtype=torch.int64)])
        tokens = torch.cat([tokens, plain_logits(model, prompt, following)[-1].argmax(-1, keepdim=True)])
    return tokens.tolist()


@torch.no_grad()
def compare_tokens(
    engine: ServingEngine, model: Any, version: int, prompts: Sequence[Prompt] = PROMPTS, max_new_tokens: int = 8
) -> MismatchVerdict:
    """Greedy completions of the engine against plain forward passes of transformers.

    Args:
        version: of the weights that the engine serves.
    """
    greedy = SamplingSettings(group_size=1, max_new_tokens=max_new_tokens, temperature=0.0)
    engine.submit(prompts, greedy, seed=1, step=0)
    missing = {prompt.index: prompt for prompt in prompts}
    num_tokens, num_other, worst = 0, 0, 0.0
    while missing:
        for part in engine.finished():
            assert part.policy_version == version, "completions of weights that are not served any more"
            prompt = missing.pop(part.index)
            tokens = part.token_ids[0][part.loss_mask[0].bool()]
            expected_tokens = greedy_tokens(model, prompt, max_new_tokens)
            num_tokens += len(tokens)
            num_other += tokens.tolist() != expected_tokens
            logits = plain_logits(model, prompt, tokens)
            expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            worst = max(worst, float((part.logprobs[0, : len(tokens)] - expected).abs().max()))
    return MismatchVerdict(num_tokens=num_tokens, num_other=num_other, worst_distance=worst)

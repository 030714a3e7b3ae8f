"""The code in vLLM's worker processes, each of which holds a shard of the model.

vLLM imports this module in each of them before it loads the model (engine argument `worker_extension_cls`), and mixes
`Extension` into its worker, whose methods `AsyncLLM.collective_rpc` calls.

On a CPU vLLM 0.32.0 copies linear weights into the order that its kernels read and drops the originals; it keeps those
of the head beside a copy, and computes from the copy; and it replaces those of experts by reordered ones, which a
second `process_weights_after_loading` does not reorder. A weight that is filled in place would be served nowhere, or
read in the wrong order. So the loader here keeps all weights plain: linear layers and the head compute with
`torch.nn.functional.linear`, experts with `PlainExperts`, from the parameters that a weight sync fills. `check_plain`
refuses a model for which this does not hold.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import ModelConfig, VllmConfig  # pyright: ignore[reportMissingImports]
from vllm.config.load import LoadConfig  # pyright: ignore[reportMissingImports]
from vllm.distributed import parallel_state  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.fused_moe.activation import (  # pyright: ignore[reportMissingImports]
    MoEActivation,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # pyright: ignore[reportMissingImports]
    CPUUnquantizedExperts,
)
from vllm.model_executor.model_loader import register_model_loader  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.default_loader import (  # pyright: ignore[reportMissingImports]
    DefaultModelLoader,
)
from vllm.model_executor.model_loader.dummy_loader import (  # pyright: ignore[reportMissingImports]
    DummyModelLoader,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.sampler import Sampler  # pyright: ignore[reportMissingImports]

from rlinf_workers.addresses import ON_ONE_MACHINE
from rlinf_workers.engines.fused_experts import experts_as_modelled
from rlinf_workers.engines.inside import Inside, RenamedModel, enter
from rlinf_workers.engines.server_processes import end_with_parent, keep_errors
from rlinf_workers.engines.serving_layout import adapt_served
from rlinf_workers.engines.vllm.arguments import ADAPTER, PLAIN, PLAIN_DUMMY
from rlinf_workers.engines.vllm.child import FOLDER_VARIABLE
from rlinf_workers.engines.vllm.requests import POSITIONS
from rlinf_workers.engines.vllm.tiles import know_largest_picture, see_as_trained
from rlinf_workers.gloo_guard import guard_gloo
from rlinf_workers.models.lora_settings import LoraSettings
from rlinf_workers.models.pictures import rope_offset, rope_positions
from rlinf_workers.roles.records.pictures import Pictures, ProcessedPicture

if folder := os.environ.get(FOLDER_VARIABLE):  # in a process of an engine, not in a test
    end_with_parent()
    keep_errors(Path(folder), "vllm")
    os.environ.update(ON_ONE_MACHINE)
    guard_gloo()
    know_largest_picture()

GREEDY_BELOW = 1e-5
"""vLLM samples greedily at temperatures below this."""


class Extension:
    """Methods of vLLM's worker that the engine calls."""

    model_runner: Any
    rlinf_kind: type[Inside] = Inside
    """What replies to the worker; tests replace it."""

    def rlinf_prepare(self) -> None:
        """Called once, when the model is loaded. Raises: RuntimeError for a model whose weights are not plain."""
        model = self.model_runner.get_model()
        check_plain(model)
        if hasattr(model, "get_mrope_input_positions"):
            model.get_mrope_input_positions = prompt_positions
        see_as_trained(model)
        sampler = self.model_runner.sampler
        self.model_runner.sampler = TemperedSampler(sampler.logprobs_mode, sampler.use_fp64_gumbel)
        if current_platform.is_cpu():
            forget_shared_memory()
            self.model_runner.sampler.runner = self.model_runner
            self.model_runner.input_batch.generators = NeverRewound(self.model_runner.input_batch.generators)

    def rlinf_enter(self, ticket: str) -> None:
        """See `inside.enter`; vLLM runs it between two batches."""
        rank, model = parallel_state.get_tp_group().rank_in_group, self.model_runner.get_model()
        enter(ticket, RenamedModel(model, merged_name), rank=rank, sizes=shard_sizes(model), kind=self.rlinf_kind)


def forget_shared_memory() -> None:
    """Removes the name of the memory through which this process reduces with the others of a model over several CPU
    slots, once all have opened it. vLLM 0.32.0 leaves 4 MB a process behind, also when it ends by itself."""
    group: Any = parallel_state.get_tp_group()
    reduces = getattr(group.device_communicator, "dist_module", None)
    if name := getattr(reduces, "group_name", None):
        Path("/dev/shm", f"{name}_{group.rank_in_group}").unlink(missing_ok=True)


def shard_sizes(model: nn.Module) -> dict[str, int]:
    """How vLLM shards a model, see `HeldWeights.sizes`."""
    tp = parallel_state.get_tp_group().world_size
    whole_tower = any(getattr(part, "use_data_parallel", False) for part in model.modules())
    return {"tp": tp, "ep": 1, "expert_tp": tp, "tower_tp": 1 if whole_tower else tp}


def merged_name(name: str) -> str:
    """vLLM keeps the experts in a module of their own below `experts`, and a decoder behind a vision tower below
    `language_model`, or `model.text_model`."""
    name = name.removeprefix("language_model.").replace(".experts.routed_experts.", ".experts.")
    return re.sub(r"^model\.text_model\.", "model.", name)


def prompt_positions(token_ids: Sequence[int], features: Sequence[Any]) -> tuple[Tensor, int]:
    """The positions of a prompt by those that come with its pictures and videos, in place of those that vLLM computes.

    Args:
        features: vLLM's `MultiModalFeatureSpec` of each of them; of none for a prompt that is text alone.
    Returns: [3, L] int64, and how far the positions after them differ from the number of tokens.
    """
    if not features:
        return torch.arange(len(token_ids)).expand(3, -1), 0
    own = [feature.data[POSITIONS[feature.modality]].data for feature in features]
    pictures = Pictures(
        pictures=tuple(
            ProcessedPicture(
                token_ids=one[0, :-1], arguments={}, position_ids=one[:, :-1], next_position=int(one[0, -1]), digest=""
            )
            for one in own
        ),
        begins=tuple(feature.mm_position.offset for feature in features),
    )
    return rope_positions(pictures, len(token_ids)), rope_offset(pictures)


class TemperedSampler(Sampler):
    """Reports log-probabilities of the full distribution at the sampling temperature, 1 for greedy sampling.

    vLLM knows two kinds: raw ones, at temperature 1, and processed ones, of the tokens that top_p, top_k and min_p
    leave.
    """

    _temperature: Tensor | None = None
    """[B] of the batch that is sampled; None: all of it greedily."""
    runner: Any = None
    """vLLM's model runner on a CPU: requests of which it has computed a part of the prompt are sampled with the others,
    and their tokens discarded. Their generators go back to where they were, see `NeverRewound`."""

    def forward(self, logits: Tensor, sampling_metadata: Any, *arguments: Any, **keywords: Any) -> Any:
        self._temperature = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        generators = sampling_metadata.generators
        rows = [] if self.runner is None else self.runner.discard_request_mask.np[: len(logits)].nonzero()[0].tolist()
        states = {row: generators[row].get_state() for row in rows if row in generators}
        output = super().forward(logits, sampling_metadata, *arguments, **keywords)
        for row, state in states.items():
            generators[row].set_state(state)
        return output

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # type: ignore[override] - a static method of vLLM's
        """logits: [B, V]"""
        if self._temperature is not None:
            temperature = self._temperature.masked_fill(self._temperature < GREEDY_BELOW, 1.0)
            logits = logits.float() / temperature[:, None]
        return logits.log_softmax(dim=-1, dtype=torch.float32)


class NeverRewound(dict[int, torch.Generator]):
    """Generators of the requests in a batch. vLLM looks up those whose tokens it discards, and moves them back by an
    offset (0.32.0, `_bookkeeping_sync`), which generators on a CPU do not have: its core process would end."""

    def get(self, *_: Any) -> None:  # type: ignore[override] - nothing else calls it
        return None


class PlainExperts(CPUUnquantizedExperts):
    """Computes experts from their weights as the model has them: one after the other, each for its tokens."""

    @staticmethod
    def is_supported_config(*_: Any, **__: Any) -> tuple[bool, str | None]:
        return True, None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leaves them as they are."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        """Args: output, hidden_states: [T, H]; w1: [E, 2 I, H] gate and up; w2: [E, H, I]; topk_*: [T, k]."""
        output.zero_()
        for expert in topk_ids.unique().tolist():
            rows, places = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
            out = functional.linear(functional.silu(gate) * up, w2[expert])
            output.index_add_(0, rows, out * topk_weights[rows, places, None].to(out.dtype))


class _Plain:
    """Loads a model and leaves its weights as it has them; mixed into a loader of vLLM."""

    def __init__(self, load_config: LoadConfig) -> None:
        own = copy.copy(load_config)
        own.load_format = "dummy" if load_config.load_format == PLAIN_DUMMY else "auto"
        super().__init__(own)  # type: ignore[call-arg] - of vLLM's loader

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)  # type: ignore[misc] - of vLLM's loader
        if not current_platform.is_cpu():
            return
        for module in model.modules():
            if hasattr(getattr(module, "quant_method", None), "experts_cls"):
                module.quant_method.experts_cls = PlainExperts  # type: ignore[union-attr]
            elif "weight" in module._parameters:
                module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment] - vLLM's own mark

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        model = super().load_model(vllm_config, model_config, prefix)  # type: ignore[misc] - of vLLM's loader
        if (adapter := vllm_config.additional_config.get(ADAPTER)) is not None:
            held, group = RenamedModel(model, merged_name), parallel_state.get_tp_group()
            lora, sizes = msgspec.convert(adapter, LoraSettings), shard_sizes(model)
            adapt_served(held, model_config.model, lora, sizes, group.rank_in_group, group.world_size)
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = functional.linear  # the head has no mark, and computes from a copy
        return model


@register_model_loader(PLAIN)
class PlainLoader(_Plain, DefaultModelLoader):
    """With the weights of the model's folder."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        turn_experts(model, Path(model_config.model))
        super().load_weights(model, model_config)


def turn_experts(model: nn.Module, folder: Path) -> None:
    """Makes a model read its experts as its files have them."""
    layers = [module for module in model.modules() if getattr(module, TRANSPOSED, False)]
    if layers and experts_as_modelled(folder):
        for layer in layers:
            setattr(layer, TRANSPOSED, False)


TRANSPOSED = "is_fused_checkpoint_transposed"
"""vLLM's mark of layers of experts."""


@register_model_loader(PLAIN_DUMMY)
class PlainDummyLoader(_Plain, DummyModelLoader):
    """With any weights; a sync fills them before a prompt is accepted."""


def check_plain(model: nn.Module) -> None:
    """Checks that every layer computes from its parameters, not from copies.

    Raises: RuntimeError naming the layers that do not.
    """
    if names := sorted(_not_plain(model), key=lambda name: ".experts" not in name):  # those that a reload loses first
        raise RuntimeError(
            f"vLLM computes {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''} from "
            "copies of their weights, which a weight sync does not reach; use the engine huggingface or sglang"
        )


def _not_plain(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "experts_cls"):
            fused = method.moe_kernel.fused_experts
            if current_platform.is_cpu() and type(fused) is not PlainExperts:
                yield f"{name} ({type(fused).__name__})"
        elif method is not None and type(getattr(method, "plain", method)).__name__ not in PLAIN_METHODS:
            yield f"{name} ({type(method).__name__})"
        elif getattr(module, "cpu_linear", functional.linear) is not functional.linear:
            yield name


PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""How vLLM computes layers without quantization."""

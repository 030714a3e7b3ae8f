"""Tests every causal architecture of the installed transformers: which ways compute it, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlinf_workers.models.small_copy import NoSmallCopy
from rlinf_workers.roles.language.probe import WAYS, ProbeResult, probe_architecture, probe_refusal, recurrent_state

CHANGES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{name: {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]} for name in ("lfm2", "lfm2_moe")},
    **{name: {"sliding_window": 4096} for name in ("starcoder2", "exaone4")},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "nemotron": {"num_key_value_heads": 8},
    "phi3": {"sliding_window": 2047},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
}
"""Config values for architectures whose defaults give no model, or not all of its kinds of layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureResult:
    """The result for one architecture."""

    model_type: str
    refused: str | None
    """Why `rlinf train` and `rlinf eval` with the Hugging Face engine refuse it; None: they accept it."""
    largest: float | None = None
    """Nats, the largest error of engine or actor; None if it is refused."""
    bound: float | None = None
    ways: tuple[str, ...] = ()
    """The `probe.WAYS` that compute it correctly."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def model_types() -> list[str]:
    """All architectures for which transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def verdict_on(model_type: str, *, seed: int = 4) -> ArchitectureResult:
    """Args:
    seed: of the small copy's weights.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(model_type, **CHANGES.get(model_type, {}))
        reason = recurrent_state(config) and probe_refusal(config, (), num_tokens=1)
        probes = {} if reason else probe_architecture(config, tuple(WAYS), seed=seed)
    except NoSmallCopy as error:
        return ArchitectureResult(model_type=model_type, refused=f"it could not be tried: {error}")
    except Exception as error:  # noqa: BLE001 - a class of transformers without working defaults
        return ArchitectureResult(model_type=model_type, refused=f"its defaults make no model: {type(error).__name__}")
    needed = [probes[way] for way in ("engine", "actor") if way in probes]
    reason = reason or next((f"{probe.way}: {probe.reason}" for probe in needed if not probe.is_right), None)
    if reason is not None:
        return ArchitectureResult(model_type=model_type, refused=reason)
    return ArchitectureResult(
        model_type=model_type,
        refused=None,
        largest=max(_largest(probe) for probe in needed),
        bound=needed[0].bound,
        ways=tuple(way for way, probe in probes.items() if probe.is_right),
    )


def _largest(probe: ProbeResult) -> float:
    assert probe.largest is not None, "it is right"
    return probe.largest

"""Loads checkpoints of pi0 and pi0.5 in openpi's PyTorch files, or in LeRobot's, which have the same names.

`policy` is the spec of pi0 or pi0.5, whose name is also in config.json. Names are those that openpi's conversion writes
(`examples/convert_jax_model_to_pytorch.py`). The files have one of two tied tensors: `lm_head` of PaliGemma is its
token embeddings; that of the expert is not used. Sizes come from the tensors, and so do numbers of heads, since all
heads share their keys in both of openpi's sizes; SigLIP So400m has 16. The number of predicted actions is only in
config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlinf_comm.weights import TensorSpec
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.plugins import POLICIES
from rlinf_workers.policies.added_weights import is_head_of_rl
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.pi0.options import check_tokenizer, no_checkpoint
from rlinf_workers.policies.pi0.spec import Pi0Spec

NUM_VISION_HEADS = 16
HORIZON_KEYS = ("chunk_size", "action_horizon")
"""Keys in config.json for the number of predicted actions, by LeRobot and by openpi."""
VLM, EXPERT = "paligemma_with_expert.paligemma.model.", "paligemma_with_expert.gemma_expert.model."
EMBEDDINGS = "paligemma_with_expert.paligemma.lm_head.weight"
IGNORED = "paligemma_with_expert.gemma_expert.lm_head.weight"
ACTION_TIME = ("state_proj", "action_in_proj", "action_time_mlp_in", "action_time_mlp_out")
"""Layers of pi0 that transformers' class has in a separate module, `embed_action_time`."""

Make = Callable[[Mapping[str, Any]], nn.Module]
"""Arguments of PI0Config -> the model, with random weights."""


def is_openpi(folder: str) -> bool:
    """Whether a folder was not written by transformers' `save_pretrained`, whose config.json has a `model_type`. Files
    of openpi may come without a config.json."""
    path = Path(folder, "config.json")
    if not path.is_file():
        return _has_weights(Path(folder))
    return "model_type" not in json.loads(path.read_text())


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def model_config(folder: str, policy: Pi0Spec, horizon: int | None = None) -> dict[str, Any]:
    """Arguments of PI0Config for a checkpoint, from config.json and the headers of its files.

    Args:
        horizon: number of predicted actions, if config.json does not have it.

    Raises:
        PolicyError: the checkpoint is of another model, or a file is missing.
        WeightFilesError: its files are incomplete.
    """
    config = _read_config(Path(folder), policy, horizon)
    check_tokenizer(Path(folder))
    files = WeightFiles(folder)
    _check_mark(folder, files, policy)
    shapes = {name: spec.shape for name, spec in _named(files, policy).items()}
    vision, text, expert = "model.vlm.vision_tower.", "model.vlm.language_model.", "model.dit."
    width, _, patch_size, _ = _shape(shapes, vision + "embeddings.patch_embedding.weight")
    num_patches, _ = _shape(shapes, vision + "embeddings.position_embedding.weight")
    num_tokens, text_width = _shape(shapes, text + "embed_tokens.weight")
    return {
        "vlm_config": {
            "model_type": "paligemma",
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": width,
                "intermediate_size": _shape(shapes, vision + "encoder.layers.0.mlp.fc1.weight")[0],
                "num_hidden_layers": _num_layers(shapes, vision + "encoder.layers."),
                "num_attention_heads": NUM_VISION_HEADS,
                "image_size": patch_size * round(num_patches**0.5),
                "patch_size": patch_size,
                "vision_use_head": False,
            },
            "text_config": _gemma(shapes, text) | {"vocab_size": num_tokens},
            "image_token_id": num_tokens,
            "projection_dim": text_width,
        },
        "dit_config": _gemma(shapes, expert),
        "chunk_size": next(config[key] for key in HORIZON_KEYS if key in config),
        "max_action_dim": _shape(shapes, "action_out_proj.weight")[0],
    } | ({"max_state_dim": _shape(shapes, "embed_action_time.state_proj.weight")[1]} if policy.has_state_token else {})


def checked_config(folder: str, policy: Pi0Spec, make: Make, horizon: int | None = None) -> dict[str, Any]:
    """`model_config`, after a check that the files fit a model with these arguments.

    Raises: as `model_config`; PolicyError that lists tensors that do not fit.
    """
    config = model_config(folder, policy, horizon)
    with torch.device("meta"):
        _check_files(folder, policy, make(config).state_dict())
    return config


def loaded(folder: str, policy: Pi0Spec, make: Make, horizon: int | None = None) -> nn.Module:
    """The model of a folder that `checked_config` accepts; without weights if torch's default device is `meta`."""
    model = make(model_config(folder, policy, horizon))
    if torch.get_default_device().type != "meta":
        _load(model, folder, policy)
    return model


def _check_files(folder: str, policy: Pi0Spec, expected: Mapping[str, torch.Tensor]) -> None:
    shapes = {name: spec.shape for name, spec in _named(WeightFiles(folder), policy).items()}
    for what, names in {
        "lacks": [name for name in expected if name not in shapes],
        f"has other tensors than {policy.published_model}:": [name for name in shapes if name not in expected],
        "has in another shape": [n for n in expected if n in shapes and shapes[n] != tuple(expected[n].shape)],
    }.items():
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise PolicyError(f"{folder} {what} {', '.join(names[:4])}{more} (after openpi's prefixes were renamed)")


@torch.no_grad()
def _load(model: nn.Module, folder: str, policy: Pi0Spec) -> None:
    files, tensors = WeightFiles(folder), model.state_dict()
    for name in files.specs:
        if (mine := own_name(name, policy)) is not None:
            tensors[mine].copy_(files.read(name))


def own_name(name: str, policy: Pi0Spec) -> str | None:
    """The name in our model of a tensor in the files; None if it is not used."""
    name = name.removeprefix("model.")
    if name == IGNORED or is_head_of_rl(name):
        return None
    if name == EMBEDDINGS:
        return "model.vlm.language_model.embed_tokens.weight"
    if policy.has_state_token and name.startswith(tuple(f"{layer}." for layer in ACTION_TIME)):
        return f"embed_action_time.{name}"
    name = name.replace(VLM, "model.vlm.").replace(EXPERT, "model.dit.")
    return name.replace("model.vlm.vision_tower.vision_model.", "model.vlm.vision_tower.")


def _check_mark(folder: str, files: WeightFiles, policy: Pi0Spec) -> None:
    there = {name.removeprefix("model.") for name in files.specs}
    if f"{policy.own_layer}.weight" not in there:
        family = [spec for spec in POLICIES.specs() if isinstance(spec, Pi0Spec)]
        text = f"{folder} has no {policy.own_layer}, which {policy.published_model} has"
        for other in family:
            if f"{other.own_layer}.weight" in there:
                text += f"; it has {other.published_model}'s {other.own_layer}, so use the policy {other.name}"
        raise PolicyError(text)


def _read_config(folder: Path, policy: Pi0Spec, horizon: int | None) -> dict[str, Any]:
    """config.json, with `horizon` if it has none; an openpi folder may lack the file."""
    path = folder / "config.json"
    if not path.is_file() and not _has_weights(folder):
        raise no_checkpoint(folder, f"a checkpoint of openpi's or LeRobot's {policy.published_model}")
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if (model_type := config.get("type", config.get("model_type", policy.name))) != policy.name:
        raise PolicyError(f"{path} is of type {model_type!r}; this policy loads {policy.name!r}")
    if any(key in config for key in HORIZON_KEYS):
        return config
    if horizon is None:
        lacks = f"has neither {' nor '.join(HORIZON_KEYS)}" if path.is_file() else "does not exist"
        raise PolicyError(
            f"{path} {lacks}, the number of actions it predicts; set policy.options.horizon (in openpi 50 for "
            "pi0_libero, 10 for pi05_libero)"
        )
    return config | {HORIZON_KEYS[0]: horizon}


def _named(files: WeightFiles, policy: Pi0Spec) -> dict[str, TensorSpec]:
    return {mine: spec for name, spec in files.specs.items() if (mine := own_name(name, policy)) is not None}


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise PolicyError(f"its files have no {name} (after openpi's prefixes were renamed)")
    return shapes[name]


def _num_layers(shapes: Mapping[str, Any], prefix: str) -> int:
    numbers = [int(match[1]) for name in shapes if (match := re.match(re.escape(prefix) + r"(\d+)\.", name))]
    return 1 + max(numbers, default=-1)


def _gemma(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, Any]:
    """Sizes of a Gemma whose heads share one key head."""
    first = prefix + "layers.0."
    queries, width = _shape(shapes, first + "self_attn.q_proj.weight")
    head_size, _ = _shape(shapes, first + "self_attn.k_proj.weight")
    return {
        "model_type": "gemma",
        "hidden_size": width,
        "intermediate_size": _shape(shapes, first + "mlp.gate_proj.weight")[0],
        "num_hidden_layers": _num_layers(shapes, prefix + "layers."),
        "num_attention_heads": queries // head_size,
        "num_key_value_heads": 1,
        "head_dim": head_size,
    }

"""The specification of an OpenVLA model, from a folder in the published format or from small sizes in a recipe.

The format is that of `openvla/openvla-7b`: config.json (`text_config`, `timm_model_ids`, `norm_stats`, ...),
preprocessor_config.json, tokenizer.json, and safetensors files, of which only the headers are read here. The sizes of
the towers come from their tensors, their numbers of heads from timm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_comm.weights import TensorSpec
from rlinf_envs import ActionSpec
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.policies.added_weights import check_is_no_adapter
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.openvla.actions import ActionStatistics
from rlinf_workers.policies.openvla.prompts import NUM_WORD_IDS
from rlinf_workers.policies.openvla.spec import MODEL_TYPE, STATISTICS_FILE
from rlinf_workers.policies.openvla.vision import TowerShape

NUM_HEADS = {"vit_large_patch14_reg4_dinov2.lvd142m": 16, "vit_so400m_patch14_siglip_224": 16}
"""Name in timm -> number of heads, for the towers of `dinosiglip-vit-so-224px`."""
TOWERS = ("vision_backbone.featurizer.", "vision_backbone.fused_featurizer.")
"""Prefixes of the tensor names of the towers: DINOv2, then SigLIP."""
NUM_BINS = 256
NORMALIZATIONS = {"quantiles": ("q01", "q99"), "bounds": ("min", "max")}
"""Normalization -> the statistics of a dataset that are scaled to -1 and 1."""
DINO_MEAN, DINO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIGLIP_MEAN = SIGLIP_STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModelSizes:
    """Sizes of a small model without a checkpoint."""

    image_size: int = 56
    """Side in pixels to which pictures are scaled."""
    patch_size: int = 14
    vision_width: int = 64
    vision_blocks: int = 2
    vision_heads: int = 2
    width: int = 128
    """Width of the language model."""
    num_layers: int = 2
    num_heads: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Everything that determines a model's tensors, inputs and outputs."""

    towers: tuple[TowerShape, TowerShape]
    text_config: Mapping[str, Any]
    """Arguments of transformers' LlamaConfig."""
    num_tokens: int
    """Size of the vocabulary before padding; the last `num_bins` tokens are action bins, the last one the lowest."""
    num_bins: int
    image_size: int
    means: tuple[tuple[float, ...], ...]
    """Mean of each colour, for each tower."""
    stds: tuple[tuple[float, ...], ...]
    statistics: ActionStatistics
    state_statistics: ActionStatistics | None = None
    """Statistics of the robot's state, if the dataset has them."""
    tokenizer: str | None = None
    """Path of tokenizer.json; None: the tokens are words."""
    dataset: str | None = None
    """Name of the dataset whose statistics are used, in a checkpoint."""


def spec_of_sizes(chosen: TinyModelSizes, actions: ActionSpec) -> ModelSpec:
    """A small model whose bins span the environment's actions.

    Raises: PolicyError for inconsistent sizes, or actions without bounds.
    """
    for whole, part in (("image_size", "patch_size"), ("vision_width", "vision_heads"), ("width", "num_heads")):
        if getattr(chosen, whole) % getattr(chosen, part):
            sizes = f"{getattr(chosen, whole)} and {getattr(chosen, part)}"
            raise PolicyError(f"options.{whole} has to be a multiple of options.{part}; they are {sizes}")
    if not (actions.low.isfinite().all() and actions.high.isfinite().all()):
        raise PolicyError("its bins span the environment's actions, but these have no bounds")
    tower: dict[str, Any] = {
        "width": chosen.vision_width,
        "num_blocks": chosen.vision_blocks,
        "num_heads": chosen.vision_heads,
        "mlp_width": 2 * chosen.vision_width,
        "patch_size": chosen.patch_size,
        "num_patches": chosen.image_size // chosen.patch_size,
    }
    num_tokens = NUM_WORD_IDS + NUM_BINS
    low, high = actions.low.flatten().tolist(), actions.high.flatten().tolist()
    return ModelSpec(
        towers=(TowerShape(**tower, num_registers=1, has_class_token=True), TowerShape(**tower)),
        text_config={
            "vocab_size": num_tokens,
            "hidden_size": chosen.width,
            "intermediate_size": 2 * chosen.width,
            "num_hidden_layers": chosen.num_layers,
            "num_attention_heads": chosen.num_heads,
        },
        num_tokens=num_tokens,
        num_bins=NUM_BINS,
        image_size=chosen.image_size,
        means=(DINO_MEAN, SIGLIP_MEAN),
        stds=(DINO_STD, SIGLIP_STD),
        statistics=ActionStatistics(low=low, high=high, mask=[True] * len(low)),
        tokenizer=None,
    )


def spec_of_folder(folder: str, unnorm_key: str | None, normalization: str) -> ModelSpec:
    """The model of a published checkpoint.

    Args:
        unnorm_key: the dataset whose statistics scale the actions; None: the only one.
        normalization: a key of `NORMALIZATIONS`.

    Raises:
        PolicyError: the checkpoint is not OpenVLA's, or a file or the statistics are missing.
        WeightFilesError: its safetensors files are incomplete.
    """
    check_is_no_adapter(folder)
    config, processor = _json(folder, "config.json"), _json(folder, "preprocessor_config.json")
    _check_kind(folder, config, processor)
    specs = WeightFiles(folder).specs
    tower_ids = config["timm_model_ids"]
    pairs = zip(TOWERS, tower_ids, strict=True)
    tokenizer = Path(folder, "tokenizer.json")
    if not tokenizer.is_file():
        raise PolicyError(f"{tokenizer} does not exist; copy it from the published checkpoint")
    text_config = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    unnorm_key, dataset = dataset_of(folder, config, unnorm_key)
    means, stds = _colours(processor)
    has_states = set(NORMALIZATIONS[normalization]) <= set(dataset.get("proprio", {}))
    dino, siglip = (_tower(specs, prefix, NUM_HEADS[name], folder) for prefix, name in pairs)
    return ModelSpec(
        towers=(dino, siglip),
        text_config=text_config,
        num_tokens=specs["language_model.lm_head.weight"].shape[0] - config.get("pad_to_multiple_of", 0),
        num_bins=config.get("n_action_bins", NUM_BINS),
        image_size=config["image_sizes"][0],
        means=means,
        stds=stds,
        statistics=statistics_of(dataset, "action", normalization),
        state_statistics=statistics_of(dataset, "proprio", normalization) if has_states else None,
        tokenizer=str(tokenizer),
        dataset=unnorm_key,
    )


def _json(folder: str, name: str) -> dict[str, Any]:
    path = Path(folder, name)
    if not path.is_file():
        raise PolicyError(f"{path} does not exist; options.folder has to be a published OpenVLA checkpoint")
    return json.loads(path.read_text())


def _check_kind(folder: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
    if config.get("model_type") != MODEL_TYPE:
        raise PolicyError(f"{folder} is a checkpoint of {config.get('model_type')!r}; this policy reads {MODEL_TYPE!r}")
    names = config.get("timm_model_ids", [])
    if len(names) != 2 or set(names) - set(NUM_HEADS):
        raise PolicyError(f"{folder} has the towers {names}; this policy knows {list(NUM_HEADS)}")
    preprocessing = {
        "image_resize_strategy": processor.get("image_resize_strategy"),
        "interpolations": processor.get("interpolations"),
    }
    computed = {"image_resize_strategy": "resize-naive", "interpolations": ["bicubic", "bicubic"]}
    if preprocessing != computed:
        raise PolicyError(f"{folder}/preprocessor_config.json sets {preprocessing}; this policy supports {computed}")
    if config.get("text_config", {}).get("model_type") != "llama":
        raise PolicyError(f"{folder} has the language model {config.get('text_config')}; this policy has Llama's")


def _tower(specs: Mapping[str, TensorSpec], prefix: str, num_heads: int, folder: str) -> TowerShape:
    mine = {name.removeprefix(prefix): spec.shape for name, spec in specs.items() if name.startswith(prefix)}
    blocks = [int(match[1]) for name in mine if (match := re.match(r"blocks\.(\d+)\.", name))]
    needed = ("patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight")
    if missing := [prefix + name for name in needed if name not in mine]:
        raise PolicyError(f"{folder}: {', '.join(missing)} not in its safetensors files; is it another architecture?")
    width, _, patch_size, _ = mine["patch_embed.proj.weight"]
    return TowerShape(
        width=width,
        num_blocks=max(blocks),  # the largest number; the last block is not used
        num_heads=num_heads,
        mlp_width=mine["blocks.0.mlp.fc1.weight"][0],
        patch_size=patch_size,
        num_patches=round(mine["pos_embed"][1] ** 0.5),
        num_registers=mine["reg_token"][1] if "reg_token" in mine else 0,
        has_class_token="cls_token" in mine,
        has_layer_scale="blocks.0.ls1.scale_factor" in mine,
    )


def _colours(processor: Mapping[str, Any]) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """Mean and standard deviation of each colour, for each tower. The published processor normalizes with the numbers
    in `tvf_normalize_params` if it has them: openvla's conversion rounds them to bfloat16, but not `means` and
    `stds`."""
    rows = processor.get("tvf_normalize_params")
    means = [row["mean"] for row in rows] if rows else processor["means"]
    stds = [row["std"] for row in rows] if rows else processor["stds"]
    return tuple(map(tuple, means)), tuple(map(tuple, stds))


def dataset_of(folder: str, config: Mapping[str, Any], unnorm_key: str | None) -> tuple[str, Mapping[str, Any]]:
    """The name and the statistics of a dataset. Those of dataset_statistics.json, which fine-tuning writes, replace
    those of the same name in config.json. Default: the only dataset of that file, or else of config.json.

    Raises: PolicyError if there are none; lists those that there are.
    """
    path, in_config = Path(folder, STATISTICS_FILE), config.get("norm_stats", {})
    in_file: Mapping[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if unnorm_key is None and len(in_file or in_config) == 1:
        (unnorm_key,) = in_file or in_config
    there = {**in_config, **in_file}
    if unnorm_key is None or unnorm_key not in there:
        missing = "options.unnorm_key is not set" if unnorm_key is None else f"no statistics of {unnorm_key!r}"
        sources = {STATISTICS_FILE: in_file, "norm_stats": in_config}
        has = [f"{name} has {', '.join(sorted(datasets))}" for name, datasets in sources.items() if datasets]
        raise PolicyError(f"{folder}: {missing}; {'; '.join(has) or 'norm_stats has none'}")
    return unnorm_key, there[unnorm_key]


def statistics_of(dataset: Mapping[str, Any], what: str, normalization: str) -> ActionStatistics:
    """
    Args:
        what: `action` or `proprio`.

    Raises: PolicyError if the dataset has no such statistics.
    """
    statistics, keys = dataset.get(what, {}), NORMALIZATIONS[normalization]
    if missing := [key for key in keys if key not in statistics]:
        has = ", ".join(sorted(statistics)) or "nothing"
        raise PolicyError(f"the statistics of {what!r} have no {' and no '.join(missing)}; they have {has}")
    low, high = (statistics[key] for key in keys)
    return ActionStatistics(low=low, high=high, mask=statistics.get("mask", [True] * len(low)))

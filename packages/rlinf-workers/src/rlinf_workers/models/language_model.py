"""Hugging Face causal language models and their tokenizers: build from a config, load from a folder, save.

Code in a model folder is never run, and nothing is downloaded; transformers would ask about the former on the terminal.

Trap (measured with transformers 5.23): `AutoTokenizer` ignores `tokenizer_class` beside a Qwen2 config and builds a
byte-level tokenizer, which silently drops the spaces of a character tokenizer; so a folder that names
PreTrainedTokenizerFast is loaded with exactly that class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rlinf_comm import record
from rlinf_workers.models.lora_settings import LoraSettings
from rlinf_workers.models.picture_processor import copy_processor
from rlinf_workers.models.pictures import auto_class
from rlinf_workers.models.placement import align
from rlinf_workers.models.sharded_init import meta_parameters

ADAPTER_CONFIG = "adapter_config.json"
"""A folder with this file contains an adapter (models/lora.py), not a model."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """Which model to build; the same settings give the same weights in every process."""

    folder: str
    """A Hugging Face folder: config.json and tokenizer, with weights if `has_weights`."""
    has_weights: bool
    """False: initialise from the config with `seed`."""
    dtype: str = "float32"
    quantization: Literal["fp8"] | None = None
    """fp8: linear layers of a model that generates have their weights in FP8, and `dtype` is that of everything
    else."""
    adapter: LoraSettings | None = None
    """Of a model that generates: its linear layers have the adapter's tensors beside their weights
    (models/adapted_modules.py), all of them 0 until a weight sync fills them."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model in memory, with the tokens that generation needs."""

    model: Any
    """transformers.PreTrainedModel, in eval mode."""
    tokenizer: Any
    """Only used for stop strings."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    pad_id: int
    """Padding token: the tokenizer's pad token, or an end token if it has none."""


def load_model(settings: ModelSettings) -> LoadedModel:
    """The model on the host, its tokenizer and its end tokens.

    Raises: ValueError if there are no end tokens, nothing that FP8 quantizes, or no layer that the adapter changes.
    """
    tokenizer = load_tokenizer(settings.folder)
    stop_ids = stop_token_ids(settings.folder, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    model = build_model(settings, torch.device("cpu"))
    if settings.quantization is not None:
        from rlinf_workers.models.fp8_modules import quantize_modules

        quantize_modules(model)
    if settings.adapter is not None:
        from rlinf_workers.models.adapted_modules import adapt_modules

        adapt_modules(model, settings.adapter)
    return LoadedModel(model=model, tokenizer=tokenizer, stop_ids=stop_ids, pad_id=pad_id)


def is_adapter(folder: str) -> bool:
    """Whether a folder contains an adapter, not a model."""
    return Path(folder, ADAPTER_CONFIG).is_file()


def build_model(settings: ModelSettings, device: torch.device) -> Any:
    """A causal language model, or one that also reads pictures (`transformers.PreTrainedModel`), in eval mode.
    transformers chooses the attention: SDPA, or eager for a model that requires it (Gemma 2 caps attention scores). For
    an adapter's folder, the base with the adapter merged."""
    dtype = getattr(torch, settings.dtype)
    if is_adapter(settings.folder):
        from rlinf_workers.models.lora import merged_model

        model: Any = merged_model(settings.folder, dtype)
    elif settings.has_weights:
        model = pretrained_model(settings.folder, dtype)
    else:
        model = _from_config(settings)
    model = model.to(device).eval()
    align(model)
    return model


def pretrained_model(folder: str, dtype: torch.dtype) -> Any:
    """The model of a folder with weights, as transformers loads it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return auto_class(config).from_pretrained(folder, dtype=dtype, trust_remote_code=False, local_files_only=True)


def outline_model(settings: ModelSettings) -> Any:
    """Like `build_model`, inside `models.sharded_init.ShardedInit`: parameters have no memory, and weights are not
    read."""
    if not settings.has_weights:
        return _from_config(settings).eval()
    with meta_parameters():
        return _from_config(settings).eval()


def _from_config(settings: ModelSettings) -> Any:
    from transformers import AutoConfig

    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        config = AutoConfig.from_pretrained(settings.folder, trust_remote_code=False, local_files_only=True)
        dtype = getattr(torch, settings.dtype)
        return auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)


def describe_model(settings: ModelSettings, folder: str) -> None:
    """Writes config, generation config and how pictures are processed into a folder, as `save_pretrained` does beside
    a model's weights.

    No model is created, because transformers changes torch's default dtype while it creates one.
    """
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(settings.folder, trust_remote_code=False, local_files_only=True)
    config.dtype = settings.dtype
    model_class: Any = auto_class(config)._model_mapping[type(config)]
    config.architectures = [model_class.__name__]
    generation = GenerationConfig.from_model_config(config)
    if settings.has_weights and Path(settings.folder, "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(settings.folder, local_files_only=True)
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    copy_processor(settings.folder, folder)


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a Hugging Face folder; its chat template may also be that of the folder's processor
    (chat_template.json), as vision-language models are published."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config_path = Path(folder) / "tokenizer_config.json"
    config = json.loads(config_path.read_text()) if config_path.exists() else {}
    if config.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if not tokenizer.chat_template:
        tokenizer.chat_template = _json_of(Path(folder, "chat_template.json")).get("chat_template")
    return tokenizer


def end_tokens(folder: str, tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """Sources that define end tokens, with their tokens: the folder's generation_config.json and config.json (for an
    adapter, those of its base), and its tokenizer. Defaults of transformers classes for missing keys do not count."""
    if is_adapter(folder):
        from rlinf_workers.models.lora import base_of

        folder = base_of(folder)
    generation, config = (_json_of(Path(folder, name)) for name in ("generation_config.json", "config.json"))
    of_text = config if config.get("eos_token_id") is not None else config.get("text_config") or {}
    named = {
        "generation_config.json": generation.get("eos_token_id"),
        "config.json": of_text.get("eos_token_id"),
        "the tokenizer": tokenizer.eos_token_id,
    }
    ids = {who: tuple(value) if isinstance(value, (list, tuple)) else (value,) for who, value in named.items()}
    return {who: value for who, value in ids.items() if value and None not in value}


def silent_token_ids(folder: str, tokenizer: Any) -> frozenset[int]:
    """Tokens that are not part of a completion's text: special tokens, except pairs of tags such as `<think>` and
    `</think>`, and added tokens that some file of the folder defines as end or padding. An ordinary word of the
    vocabulary that a file defines as an end counts as text."""
    named = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    for name in ("config.json", "generation_config.json"):
        config = _json_of(Path(folder, name))
        for part in (config, config.get("text_config") or {}):
            named += [part.get("eos_token_id"), part.get("pad_token_id")]
    ends = {one for each in named for one in (each if isinstance(each, list) else [each])}
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(token for token, about in added.items() if about.special)}
    tags = _tags({str(tokenizer.convert_ids_to_tokens(token)): token for token in special - ends})
    return frozenset((special - tags) | (ends & set(added)))


def _tags(tokens: Mapping[str, int]) -> set[int]:
    """The special tokens that are pairs of tags.

    Example: <think> and </think>, [THINK] and [/THINK], <|begin_of_thought|> and <|end_of_thought|>.
    """
    tags = set()
    for text, token in tokens.items():
        closing = {f"{text[:1]}/{text[1:]}", f"{text[:2]}/{text[2:]}"}
        closing |= {text.replace(begin, "end") for begin in ("begin", "start") if begin in text}
        for other in closing & tokens.keys():
            tags |= {token, tokens[other]}
    return tags


def _json_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def stop_token_ids(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a completion: all those of `end_tokens`, because a chat template may end turns with another token
    than the model was trained to stop at. Raises: ValueError if there are none."""
    ids = [token for named in end_tokens(folder, tokenizer).values() for token in named]
    if not ids:
        raise ValueError(
            "neither generation_config.json nor config.json nor the tokenizer names an end token (eos_token_id)"
        )
    return tuple(dict.fromkeys(ids))

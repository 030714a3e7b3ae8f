"""The model folder that a config names, checked before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf.config.json_file import read_json
from rlinf.errors import UserError

INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
HINT = "the download or the copy was cut short; fetch the file again"

WEIGHT_FILES = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""A transformers model folder holds at least one of these."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A model folder also holds one of these; without them, transformers may silently create an empty tokenizer."""


def is_adapter(path: Path) -> bool:
    """Returns whether a folder holds a peft adapter without its base model."""
    return (path / ADAPTER_CONFIG).is_file()


def check_model_folder(path: Path, *, key: str = "model.path") -> None:
    """Checks that `path`, the value of the config key `key`, is a Hugging Face model folder.

    Raises: UserError if it does not exist, is not a folder, holds an adapter, or lacks a readable config.json, complete
        weights or a tokenizer.
    """
    if is_adapter(path):
        raise UserError(
            f"{key}={path}: the folder holds an adapter, not a model",
            hint="make a model of it and its base: rlinf export RUN --merged --output FOLDER",
        )
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(
            f"{key}={path}: {what}",
            hint="give a folder with a Hugging Face model (config.json, weights, tokenizer), or the name of one on the "
            "Hub, ORG/NAME",
        )
    names = sorted(entry.name for entry in path.iterdir())
    for what, files in (("config.json", ("config.json",)), ("weights", WEIGHT_FILES), ("tokenizer", TOKENIZER_FILES)):
        if not any((path / name).is_file() for name in files):
            looked_for = "" if what == "config.json" else f"; looked for {', '.join(files)}"
            more = ", ..." if len(names) > 5 else ""
            raise UserError(
                f"{key}={path}: the folder holds no {what} (it holds: {', '.join(names[:5]) or 'nothing'}{more})",
                hint=f"give the folder itself, not the one above it{looked_for}",
            )
    _check_model_config(path / "config.json")
    _check_own_code(path, key)
    _check_weights(path, key)


def _check_model_config(file: Path) -> None:
    parsed = _settings(file)
    if not isinstance(parsed, dict):
        raise UserError(f"{file}: must hold a JSON object, holds {type(parsed).__name__}")
    if not isinstance(parsed.get("model_type"), str):
        raise UserError(
            f"{file}: has no model_type, which says the architecture", hint="is it a model of transformers?"
        )


def _settings(file: Path) -> Any:
    try:
        return read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as JSON: {error}") from error


def own_code(folder: Path) -> str | None:
    """Describes the file of a model folder that refers to code in the folder (`auto_map`); None if no file does."""
    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        settings = _settings(file) if file.is_file() else {}
        if isinstance(settings, dict) and settings.get("auto_map"):
            named = settings["auto_map"]
            return f"{name} names code in the folder (auto_map: {', '.join(named)})"
    return None


def _check_own_code(folder: Path, key: str) -> None:
    """Checks that transformers has classes for a folder with code, because that code is never run."""
    if (named := own_code(folder)) is None:
        return
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = _settings(folder / "config.json")["model_type"]
    file = folder / "tokenizer_config.json"
    settings = _settings(file) if file.is_file() else {}
    has_tokenizer = not settings.get("auto_map") or hasattr(transformers, str(settings.get("tokenizer_class")))
    if kind in CONFIG_MAPPING_NAMES and has_tokenizer:
        return
    what = f"model_type={kind!r}" if kind not in CONFIG_MAPPING_NAMES else f"{settings.get('tokenizer_class')}"
    raise UserError(
        f"{key}={folder}: {named}, because transformers {transformers.__version__} has no {what}; code that a model "
        "brings along is never run",
        hint="use a model that transformers knows by itself, or a release of transformers that knows this one",
    )


def _check_weights(folder: Path, key: str) -> None:
    """Checks by their headers, in milliseconds, that the safetensors files transformers would read are complete.
    Weights in other formats are left to transformers."""
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        _tensors(single, key)
        return
    if not index.is_file():
        return
    files: dict[str, set[str]] = {}
    try:
        for tensor, name in read_json(index)["weight_map"].items():
            files.setdefault(str(name), set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{key}: {index} is not an index of weights: {error!r}", hint=HINT) from error
    for name, tensors in files.items():
        if not (folder / name).is_file():
            raise UserError(f"{key}={folder}: {INDEX} names {name}, which is not there", hint=HINT)
        lost = sorted(tensors - _tensors(folder / name, key))
        if lost:
            raise UserError(f"{key}={folder}: {name} lacks {lost[0]} and {len(lost) - 1} more tensors", hint=HINT)


def _tensors(file: Path, key: str) -> set[str]:
    """Returns the names of the tensors in a file; fails if the file is shorter than its header states."""
    from safetensors import SafetensorError, safe_open  # imports numpy

    try:
        with safe_open(file, framework="numpy") as opened:
            return set(opened.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{key}: {file} is no whole safetensors file: {error}", hint=HINT) from error


def model_family(folder: Path | None) -> str:
    """The model family that config.json names; empty where it cannot be read, which the checks of the inputs report."""
    try:
        name = read_json(folder / "config.json")["model_type"] if folder else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return name if isinstance(name, str) and name.isidentifier() else ""

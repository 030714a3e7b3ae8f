"""The model folders that a config names."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlinf.config.inputs import check_model_folder
from rlinf.errors import UserError


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    save_file({"weight": torch.zeros(4)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_whole_model_folder_passes(model_folder: Path):
    check_model_folder(model_folder)
    (model_folder / "model.safetensors").rename(model_folder / "pytorch_model.bin")
    (model_folder / "tokenizer.json").rename(model_folder / "vocab.json")
    check_model_folder(model_folder)


@pytest.mark.parametrize(
    ("file", "what"),
    [("config.json", "config.json"), ("model.safetensors", "weights"), ("tokenizer.json", "tokenizer")],
)
def test_a_model_folder_that_lacks_a_part_is_refused(model_folder: Path, file: str, what: str):
    (model_folder / file).unlink()
    left = ", ".join(sorted(entry.name for entry in model_folder.iterdir()))
    with pytest.raises(UserError) as caught:
        check_model_folder(model_folder)
    assert str(caught.value).startswith(f"model.path={model_folder}: the folder holds no {what} (it holds: {left})")


def test_what_is_no_folder_is_refused(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    for path, text in ((file, "is a file, not a folder"), (tmp_path / "absent", "does not exist")):
        with pytest.raises(UserError) as caught:
            check_model_folder(path)
        assert str(caught.value).startswith(f"model.path={path}: {text}\nhint: give a folder with a Hugging Face")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"model_type": "qw', "not readable as JSON"),
        ("\x00", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON: it is nested too deep"),
        ("[]", "must hold a JSON object, holds list"),
        ("{}", "has no model_type"),
    ],
)
def test_a_broken_config_json_is_refused(model_folder: Path, text: str, expected: str):
    (model_folder / "config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        check_model_folder(model_folder)
    assert str(caught.value).startswith(f"{model_folder / 'config.json'}: {expected}")


def _torn(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    if how == "empty":
        file.write_bytes(b"")
    elif how == "header":
        file.write_bytes(content[:20])
    elif how == "end":
        file.write_bytes(content[:-1])
    elif how == "text":
        file.write_text("version https://git-lfs.github.com/spec/v1")
    else:
        file.rename(folder / "part-1.safetensors")
        names = {"weight": "part-1.safetensors", "bias": f"part-{2 if how == 'lost file' else 1}.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("empty", "is no whole safetensors file"),
        ("header", "is no whole safetensors file"),
        ("text", "is no whole safetensors file"),
        ("end", "file not fully covered"),
        ("lost file", "names part-2.safetensors, which is not there"),
        ("lost tensor", "part-1.safetensors lacks bias"),
    ],
)
def test_torn_weights_are_found_before_anything_starts(model_folder: Path, how: str, expected: str):
    _torn(model_folder, how)
    with pytest.raises(UserError) as caught:
        check_model_folder(model_folder)
    assert expected in str(caught.value)

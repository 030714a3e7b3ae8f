"""The model folders that a config names."""

from pathlib import Path

import pytest

from rlinf.config.inputs import check_model_folder
from rlinf.errors import UserError


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_whole_model_folder_passes(model_folder: Path):
    check_model_folder(model_folder)
    (model_folder / "model.safetensors").rename(model_folder / "pytorch_model.bin.index.json")
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
        assert str(caught.value).startswith(f"model.path={path}: {text}\nhint: give a folder that holds a Hugging Face")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"model_type": "qw', "not readable as JSON"),
        ("\x00", "not readable as JSON"),
        ("[]", "must hold a JSON object, holds list"),
        ("{}", "has no model_type"),
    ],
)
def test_a_broken_config_json_is_refused(model_folder: Path, text: str, expected: str):
    (model_folder / "config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        check_model_folder(model_folder)
    assert str(caught.value).startswith(f"{model_folder / 'config.json'}: {expected}")

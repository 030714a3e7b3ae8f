"""The files that a config names: model folders and JSON-lines files."""

from pathlib import Path

import pytest

from rlinf.config.inputs import check_model_folder, iter_jsonl
from rlinf.errors import UserError

FIELDS = ("question", "answer")


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


def test_rows_come_in_order_and_blank_lines_are_passed_over(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"question": "a", "answer": 1, "more": []}\n\n  \n{"question": "\u00e4", "answer": "x"}', encoding="utf-8"
    )
    rows = list(iter_jsonl(file, FIELDS))
    assert [(row["question"], row["answer"]) for row in rows] == [("a", 1), ("\u00e4", "x")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"question": "b", "ans', "not a JSON object (Unterminated string"),
        (b'{"question": "b", "ans', 'the line begins \'{"question": "b", "ans\''),
        (b'{"question": "\xff", "answer": 1}', "not UTF-8 text: invalid start byte at byte 14"),
        (b"[1]", "must be a JSON object with the fields 'question', 'answer', is a list"),
        (b'{"question": "b", "reply": "1"}', "no field 'answer'; the line has 'question', 'reply'"),
        (b"{}", "no field 'question', 'answer'; the line has nothing"),
        (b'{"question": "b", "answer": null}', "field 'answer' must be text or a number, is null"),
        (b'{"question": "b", "answer": true}', "field 'answer' must be text or a number, is true"),
        (b'{"question": ["b"], "answer": 1}', "field 'question' must be text or a number, is [\"b\"]"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, expected: str):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"question": "a", "answer": 1}\n\n' + line + b"\n")
    rows = iter_jsonl(file, FIELDS)
    assert next(rows)["question"] == "a"
    with pytest.raises(UserError) as caught:
        next(rows)
    assert str(caught.value).startswith(f"{file}:3: ")
    assert expected in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    for path, text in ((tmp_path / "absent.jsonl", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError) as caught:
            list(iter_jsonl(path, FIELDS))
        assert str(caught.value) == f"{path}: {text}\nhint: check task.train_files and task.eval_files"

"""Rows of data files in every format, and what is said of those that cannot be read."""

import json
import sys
from pathlib import Path

import pytest

from rlinf.errors import UserError
from rlinf.tasks.row_files import read_rows
from rlinf.tasks.rows import BadRow, Row

ROWS = [{"question": "a", "answer": 1}, {"question": "\u00e4\n", "answer": "x, y"}]


def values(path: Path) -> list[dict]:
    rows = list(read_rows(path))
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    assert all(isinstance(row, Row) for row in rows)
    return [dict(row.values) for row in rows if isinstance(row, Row)]


def test_json_lines(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([json.dumps(ROWS[0]), "", "  ", json.dumps(ROWS[1], ensure_ascii=False)]), "utf-8")
    assert values(file) == ROWS
    assert [row.place for row in read_rows(file)] == [f"{file}:1", f"{file}:4"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("text", [json.dumps(ROWS), "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, encoding: str, suffix: str, text: str):
    if suffix == ".jsonl" and text.startswith("["):
        return
    file = tmp_path / f"rows{suffix}"
    mark = "" if encoding == "utf-8-sig" else "\ufeff"
    file.write_bytes((mark + text).encode(encoding))
    assert values(file) == ROWS
    file.write_bytes((mark + "\r\n" + text.replace("\n", "\r\n")).encode(encoding))
    assert values(file) == ROWS


def test_files_with_byte_order_marks_that_were_joined_are_read(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join((json.dumps(row) + "\n").encode("utf-8-sig") for row in ROWS))
    assert values(file) == ROWS


def test_csv_with_line_breaks_in_cells(tmp_path: Path):
    file = tmp_path / "rows.csv"
    file.write_bytes(b'\xef\xbb\xbfquestion,answer\r\na,1\r\n"b\nc","x, y"\r\n\r\nd\r\ne,2\r\n')
    rows = list(read_rows(file))
    assert [row.values if isinstance(row, Row) else str(row) for row in rows] == [
        {"question": "a", "answer": "1"},
        {"question": "b\nc", "answer": "x, y"},
        f"{file}:6: has 1 cells, the header has 2",
        {"question": "e", "answer": "2"},
    ]
    assert [row.place for row in rows] == [f"{file}:{line}" for line in (2, 3, 6, 7)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_csv_may_begin_with_blank_lines_and_have_long_cells(tmp_path: Path, encoding: str):
    file = tmp_path / "rows.csv"
    file.write_bytes(f"\n\nquestion,answer,\n{'x' * 200_000},1,\n".encode(encoding))
    assert values(file) == [{"question": "x" * 200_000, "answer": "1", "": ""}]
    assert [row.place for row in read_rows(file)] == [f"{file}:4"]


def test_parquet(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    parquet.write_table(
        pyarrow.table({"question": ["a", "b"], "choices": [["1", "2"], ["3", "4"]], "answer": [0, None]}), file
    )
    assert values(file) == [
        {"question": "a", "choices": ["1", "2"], "answer": 0},
        {"question": "b", "choices": ["3", "4"], "answer": None},
    ]
    assert [row.place for row in read_rows(file)] == [f"{file}, row 1", f"{file}, row 2"]
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="not readable as parquet"):
        list(read_rows(file))


def test_datasets_on_disk(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"question": ["a", "b"], "answer": ["1", "2"]})
    rows.save_to_disk(str(tmp_path / "one"))
    assert values(tmp_path / "one") == [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UserError) as caught:
        list(read_rows(tmp_path / "splits"))
    assert str(caught.value) == (
        f"{tmp_path / 'splits'}: holds a dataset for each of several splits ('test', 'train')\n"
        f"hint: name one of them, for example {tmp_path / 'splits' / 'train'}"
    )
    assert len(values(tmp_path / "splits" / "test")) == 2
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"torn")
    with pytest.raises(UserError, match=f"{tmp_path / 'one'}: datasets cannot load it: "):
        list(read_rows(tmp_path / "one"))


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "rows.parquet"), ("datasets", "folder")])
def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as caught:
        list(read_rows(tmp_path / name))
    assert f"needs the package {package}\nhint: install it with `pip install 'rlinf[data]'`" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"question": "b", "ans', 'the line begins \'{"question": "b", "ans\''),
        (b'{"question": "\xff", "answer": 1}', "not UTF-8 text: invalid start byte at byte 14"),
        (b"[" * 100_000, "not a JSON object"),
        (b'{"answer": "1", "x": {"y": 1, "y": 2}}', "the key 'y' appears twice in one object"),
    ],
)
def test_a_bad_line_is_named_and_the_next_is_read(tmp_path: Path, line: bytes, expected: str):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"question": "a"}\n\n' + line + b'\n{"question": "c"}\n')
    first, bad, last = read_rows(file)
    assert isinstance(bad, BadRow)
    assert str(bad).startswith(f"{file}:3: ")
    assert expected in str(bad)
    assert isinstance(first, Row) and isinstance(last, Row)
    assert (first.number, bad.number, last.number) == (1, 2, 3)

"""Data files as people have them: those that are read, and those with a mistake, which is answered on one screen that
names the file, the row and what to do."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.jobs.spec import job_spec
from rlinf.tasks.files import FileProblems

SCREEN_LINES = 24
GOOD = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]
PAIRS = [("1+1", "2"), ("2+2", "4")]
SYSTEM, USER = {"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}
ASSISTANT, OTHER = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
TURNS = (("system", "be brief"), ("user", "1+1"))

Content = bytes | Mapping[str, Any] | Callable[[], bytes]
"""Of a file, or by their names those in a folder; a function where a package is needed that may be missing."""


def lines(*rows: Any) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def parquet(**columns: list[Any]) -> Callable[[], bytes]:
    def content() -> bytes:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), file := io.BytesIO())
        return file.getvalue()

    return content


def twice() -> bytes:
    """A parquet file with two columns of one name."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = [pyarrow.array([text]) for text in ("a", "b", "1")]
    table = pyarrow.Table.from_arrays(columns, names=["question", "question", "answer"])
    parquet.write_table(table, file := io.BytesIO())
    return file.getvalue()


def arrow() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"question": ["1+1", "2+2"], "answer": ["2", "4"]})
    with pyarrow.ipc.new_stream(file := io.BytesIO(), table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def write(path: Path, content: Content) -> None:
    if isinstance(content, Mapping):
        path.mkdir()
        for name, inner in content.items():
            write(path / name, inner)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content())


def problems(top: Path, name: str, **options: Any) -> FileProblems:
    """The task with a file to train on, in its folder."""
    (top / "test.jsonl").write_bytes(lines({"question": "held out", "answer": "#### 0", "a": {"b": "c"}, "c": 0}))
    return FileProblems(
        FilesTask.model_validate(
            {"kind": "files", "train_files": f"{top}/{name}", "eval_files": f"{top}/test.jsonl"} | options
        ),
        seed=0,
    )


def load(top: Path, name: str, job: str, options: dict[str, Any]) -> None:
    """Reads a file as a job does; `options` are of the task."""
    if job == "rl":
        problems(top, name, **options)
        return
    flags = [f"--model.path={top}", f"--task.train_files=['{top}/{name}']"]
    flags += [f"--task.{key}={value}" for key, value in options.items()]
    config = load_config(job, parse_overrides(flags))
    source = job_spec(config).load().source_class(config)
    source.load(top / name)


# -- files that are read -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Readable:
    name: str
    content: Content
    problems: list[tuple[Any, str]] = field(default_factory=lambda: PAIRS)
    """Prompt or turns, and answer."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the task."""
    source: str = ""
    """What the task names; empty: the file."""


def row(content: Any, answer: str, values: dict[str, Any], **options: Any) -> Readable:
    """A JSON-lines file with one row."""
    return Readable(name="row.jsonl", content=lines(values), problems=[(content, answer)], options=options)


READABLE = [
    Readable(name="a.jsonl", content=lines(*GOOD)),
    Readable(name="a.JSONL", content=b"\n" + lines(GOOD[0]) + b"\r\n \n" + lines(GOOD[1]).rstrip()),
    Readable(name="a.jsonl", content=lines(*GOOD).decode().encode("utf-8-sig")),
    Readable(name="a.jsonl", content=lines(*GOOD).decode().encode("utf-16")),
    Readable(name="a.json", content=lines(*GOOD)),
    Readable(name="a.json", content=json.dumps(GOOD).encode()),
    Readable(name="a.json", content=b"\n " + json.dumps(GOOD, indent=2).encode() + b"\n"),
    Readable(name="a.csv", content=b"question,answer\n1+1,2\n2+2,4\n"),
    Readable(name="a.csv", content="\ufeffanswer,id,question\r\n2,x,1+1\r\n\r\n4,y,2+2\r\n".encode()),
    Readable(name="a.csv", content=b'question,answer\n"a\n""b"", c",1\n', problems=[('a\n"b", c', "1")]),
    Readable(name="a.parquet", content=parquet(question=["1+1", "2+2"], answer=["2", "4"])),
    Readable(name="a.parquet", content=parquet(question=["1+1", "2+2"], answer=[2, 4])),
    Readable(name="a.arrow", content=arrow),
    Readable(name="folder", content={"a.jsonl": lines(GOOD[0]), "b.json": lines(GOOD[1]), "notes.txt": b""}),
    Readable(name="folder", content={"train-0.parquet": parquet(question=["1+1", "2+2"], answer=["2", "4"])}),
    Readable(
        name="folder",
        content={"b.jsonl": lines(GOOD[1]), "a.jsonl": lines(GOOD[0]), "c.csv": b"x"},
        source="folder/*.jsonl",
    ),
    Readable(
        name="folder",
        content={"x": {"a.csv": b"question,answer\n1+1,2\n"}, "y": {"b.json": lines(GOOD[1])}},
        source="folder/**/*.*",
    ),
    row("p", "7", {"Problem": "p", "id": 1, "Ground_Truth": 7}),
    row("p", "c", {"question": "p", "final_answer": "c", "solution": "no"}),
    row("p", "4", {"problem": "p", "solution": "so \\boxed{4}."}),
    row("p", "#### 4", {"question": "p", "answer": "#### 4"}, answer_format="gsm8k"),
    row("b", "4", {"a": {"b": "b"}, "c": 4, "prompt": "x"}, columns={"prompt": "a.b", "answer": "c"}),
    row(TURNS[1:], "2", {"prompt": [USER], "answer": "2"}),
    row(TURNS, "2", {"messages": [SYSTEM, USER, ASSISTANT]}),
    row(TURNS, "42", {"messages": [SYSTEM, USER, ASSISTANT], "answer": "42"}),
    row(TURNS[1:], "2", {"conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]}),
    row(TURNS[1:], "2", {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}], "answer": 2}),
    row(  # verl
        TURNS[1:],
        "2",
        {"data_source": "x", "prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "2"}},
    ),
]


@pytest.mark.parametrize("file", READABLE, ids=lambda file: file.name)
def test_a_file_is_read(tmp_path: Path, file: Readable):
    write(tmp_path / file.name, file.content)
    options = {"prompt_template": "{question}"} | file.options
    loaded = problems(tmp_path, file.source or file.name, **options).all_problems()
    assert [(problem.content, problem.answer) for problem in loaded][:-1] == file.problems


# -- mistakes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mistake:
    name: str
    content: Content | None
    """None: there is no such file."""
    says: str
    """What stands behind the path."""
    mend: str
    """Beginning of the hint."""
    options: dict[str, Any] = field(default_factory=dict)
    at: str | None = None
    """The path, where it is not the name."""
    job: str = "rl"
    """Or sft or dpo."""


FIX = "fix the file, or leave bad rows out and count them with --task.on_bad_row skip"
COLUMNS = "name its columns: --task.columns.messages NAME for chats, or --task.columns.prompt NAME --task.columns.comp"
PAIR_COLUMNS = "name its columns: --task.columns.prompt NAME --task.columns.chosen NAME --task.columns.rejected NAME"
AGAIN = "download or write it again"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html>\n"
FIRST = lines(GOOD[0])


def bad_example(job: str, values: Any, says: str, mend: str = FIX, **options: Any) -> Mistake:
    """A JSON-lines file with one row, which a supervised job cannot use."""
    return Mistake(name="a.jsonl", content=lines(values), says=f":1: {says}", mend=mend, job=job, options=options)


def bad_line(values: Any, says: str, mend: str = FIX, **options: Any) -> Mistake:
    """A JSON-lines file whose second row is bad."""
    second = values if isinstance(values, bytes) else lines(values)
    return Mistake(name="a.jsonl", content=FIRST + second, says=f":2: {says}", mend=mend, options=options)


MISTAKES = [
    # no data
    Mistake(name="a.jsonl", content=None, says=": No such file or directory", mend="check the path"),
    Mistake(name="absent/a.parquet", content=None, says=": No such file or directory", mend="check the path"),
    Mistake(name="a-*.jsonl", content=None, says=": no file matches", mend="check the pattern"),
    Mistake(name="a.jsonl", content=b"", says=": the file is empty", mend="is it the right file?"),
    Mistake(name="a.parquet", content=b"", says=": the file is empty", mend="is it the right file?"),
    Mistake(name="a.jsonl", content=b"\n\n", says=": holds no problem; it has no row", mend="is it the right file?"),
    Mistake(name="a.json", content=b"[]", says=": holds no problem; it has no row", mend="is it the right file?"),
    Mistake(name="a.csv", content=b"question,answer\n", says=": holds no problem; it has no row", mend="is it the ri"),
    Mistake(name="folder", content={}, says=": the folder holds no data file", mend="name a folder with .jsonl, .json"),
    Mistake(name="folder", content={"a.txt": b"x"}, says=": the folder holds no data file", mend="name a folder with"),
    Mistake(name="folder", content={"config.json": b"{}"}, says=": the folder holds a model, no data", mend="name a f"),
    Mistake(
        name="folder",
        content={"a.jsonl.gz": gzip.compress(FIRST)},
        says=": the folder holds no data file",
        mend="unpack it: gunzip a.jsonl.gz, in ",
    ),
    Mistake(
        name="folder",
        content={"a.jsonl": FIRST, "b.csv": b"question,answer\n1,2\n"},
        says=": the folder holds data files of several formats (1 .csv, 1 .json), of which one would be read",
        mend="name the files with a pattern, for example '",
    ),
    # of another kind than their name says
    Mistake(name="a.txt", content=FIRST, says=": .txt is no known format of data", mend="use one of .jsonl, .json, .c"),
    Mistake(name="a", content=FIRST, says=": a file without an ending is no known format of data", mend="use one of"),
    Mistake(
        name="a.ndjson", content=FIRST, says=": .ndjson is no known format", mend="rename it so that it ends in .j"
    ),
    Mistake(name="a.tsv", content=b"a\tb\n", says=": .tsv is no known format of data", mend="save it with commas"),
    Mistake(
        name="a.jsonl.gz", content=gzip.compress(FIRST), says=": .gz is no known", mend="unpack it: gunzip a.jsonl"
    ),
    Mistake(
        name="a.jsonl", content=gzip.compress(FIRST), says=": is a gzip archive", mend="unpack it: gzip -dc a.jsonl"
    ),
    Mistake(
        name="a.csv", content=b"PK\x03\x04 \n", says=": is a ZIP archive", mend="unpack it: unzip -p a.csv > NEW.c"
    ),
    Mistake(
        name="a.jsonl", content=LFS, says=": holds a pointer of Git LFS", mend="fetch them with `git lfs pull --in"
    ),
    Mistake(name="a.parquet", content=LFS, says=": holds a pointer of Git LFS", mend="fetch them with `git lfs pull"),
    Mistake(
        name="folder",
        content={"a.jsonl": LFS},
        at="folder/a.jsonl",
        says=": holds a pointer of Git LFS",
        mend="fetch them with `git lfs pull",
    ),
    Mistake(name="a.json", content=PAGE, says=": is a web page", mend="download the data themselves"),
    Mistake(name="a.csv", content=PAGE, says=": is a web page", mend="download the data themselves"),
    Mistake(name="a.csv", content=FIRST, says=": holds JSON, no CSV", mend="rename it so that it ends in .jsonl"),
    Mistake(
        name="a.json", content=parquet(a=["b"]), says=": is a parquet file", mend="rename it so that it ends in .p"
    ),
    Mistake(name="a.jsonl", content=json.dumps(GOOD).encode(), says=": is one JSON array", mend="rename it so that"),
    # torn or in another form
    Mistake(
        name="a.json", content=b'[{"question": "', says=":1: row 1 is not JSON: Unterminated", mend="the file seems "
    ),
    Mistake(
        name="a.json",
        content=json.dumps(GOOD, indent=1).encode()[:-6],
        says=":8: row 2 is not JSON: Unterminated string starting at, at column 13",
        mend=f"the file seems to be cut off; {AGAIN}",
    ),
    Mistake(name="a.json", content=b"[{]", says=":1: row 1 is not JSON: Expecting property", mend="fix the file there"),
    Mistake(name="a.json", content=b"[{} {}]", says=":1: row 1 is not JSON: a comma or the end", mend="fix the file"),
    Mistake(name="a.json", content=b"[{},]", says=":1: row 2 is not JSON: Expecting value", mend="fix the file there"),
    Mistake(
        name="a.json", content=b"[{}]\n[]", says=": after the array of 1 rows stands '[]'", mend="a .json file hol"
    ),
    Mistake(
        name="a.json",
        content=json.dumps(GOOD[0], indent=1).encode(),
        says=": its objects go over several lines; a row is one line",
        mend="write them anew: jq -c . a.json > NEW.jsonl",
    ),
    Mistake(
        name="a.json",
        content=json.dumps({"version": 1, "data": GOOD}, indent=1).encode(),
        says=": its objects go over several lines; a row is one line",
        mend="write them anew: jq -c '.data[]' a.json > NEW.jsonl",
    ),
    Mistake(
        name="a.json",
        content=lines({"data": GOOD}),
        says=":1: no field 'prompt' or another usual name of it; the row has 'data'",
        mend="the rows are in its list 'data'; write them with an object a line: jq -c '.data[]' a.json > NEW.jsonl",
    ),
    bad_line(b"hello\n", "not a JSON object (Expecting value: line 1 column 1 (char 0)); the line begins 'hello"),
    bad_line(b'{"question": "b", "ans', "not a JSON object (Unterminated string"),
    bad_line(
        b'{"a": "b"},\n', "not a JSON object (Extra data: line 1 column 11 (char 10)); a line holds one object and"
    ),
    bad_line(b"{'question': 'a'}\n", "not a JSON object (Expecting property name enclosed in double quotes: line 1"),
    bad_line(b'{"question": "a", "question": "b"}\n', "the key 'question' appears twice in one object"),
    bad_line(b'{"question": "a", "x": {"y": 1, "y": 2}}\n', "the key 'y' appears twice in one object"),
    bad_line(["a", "b"], "must be a JSON object, is a list"),
    bad_line("a", "must be a JSON object, is a str"),
    Mistake(name="a.json", content=b'["a"]', says=", row 1: must be a JSON object, is a str", mend=FIX),
    Mistake(name="a.json", content=b'[{"a": 1, "a": 2}]', says=", row 1: the key 'a' appears twice", mend=FIX),
    Mistake(
        name="folder",
        content={"a.jsonl": FIRST, "b.jsonl": FIRST + b"{"},
        at="folder/b.jsonl",
        says=":2: not a JSON object",
        mend="fix the file",
    ),
    Mistake(
        name="a.csv", content=b'question,answer\n"a,1\n', says=":2: the row that begins here", mend="a cell with q"
    ),
    Mistake(name="a.csv", content=b"question,answer\na,1\nb\n", says=":3: has 1 cells, the header has 2", mend=FIX),
    Mistake(
        name="a.csv", content=b"question;answer\na;1\n", says=": its cells are separated by ';'", mend="save it with"
    ),
    Mistake(
        name="a.csv", content=b"question\tanswer\na\t1\n", says=r": its cells are separated by '\t'", mend="save it"
    ),
    Mistake(
        name="a.csv",
        content=b"question,answer,answer\n1,2,3\n",
        says=": the header has the column 'answer' tw",
        mend="re",
    ),
    Mistake(name="a.parquet", content=twice, says=": has the column 'question' twice", mend="rename or remove one"),
    Mistake(name="a.parquet", content=b"PAR1 torn", says=": not readable as parquet: Parquet magic by", mend=AGAIN),
    Mistake(name="a.arrow", content=lambda: arrow()[:300], says=": datasets cannot load it: Arrow", mend=AGAIN),
    # in another encoding
    bad_line(
        '{"question": "caf\xe9", "answer": "1"}'.encode("latin-1"),
        "not UTF-8 text: invalid continuation byte at byte 17; save the file as UTF-8",
    ),
    Mistake(
        name="a.csv",
        content="question,answer\na,1\ncaf\xe9,2\n".encode("latin-1"),
        says=r":3: not UTF-8 text: invalid continuation byte at byte 3, b'\xe9'",
        mend="save it as UTF-8; a file in a Western European encoding with iconv -f ISO-8859-1 -t UTF-8 a.csv > N",
    ),
    Mistake(
        name="a.json",
        content='[\n{"question": "caf\xe9"}]'.encode("latin-1"),
        says=":2: not UTF-8 text: invalid continuation byte at byte 17",
        mend="save it as UTF-8; a file in a Western",
    ),
    Mistake(
        name="a.jsonl",
        content=FIRST.decode().encode("utf-16-le"),
        says=": is UTF-16LE text",
        mend="save it as UTF-8: iconv -f UTF-16LE -t UTF-8 a.jsonl > NEW.jsonl",
    ),
    Mistake(
        name="a.json", content=FIRST.decode().encode("utf-32"), says=": is UTF-32 text", mend="save it as UTF-8: ic"
    ),
    Mistake(
        name="a.jsonl", content=b"\xff\xfe{\0\0\xd8}\0", says=": not UTF-16 text, though it beg", mend="save it as UTF"
    ),
    # columns and values
    bad_line({"question": "a", "answer": None}, "field 'answer' must be text or a number, is null"),
    bad_line({"question": None, "answer": "1"}, "field 'question' must be text or a number, is null"),
    bad_line({"question": " ", "answer": "1"}, "field 'question' is empty"),
    bad_line({"question": {"a": 1}, "answer": "1"}, "field 'question' must be text or a number, is {\"a\": 1}"),
    bad_line({"question": "a", "answer": ["1"]}, "field 'answer' must be text or a number, is [\"1\"]"),
    bad_line({"question": "a", "answer": True}, "field 'answer' must be text or a number, is true"),
    bad_line(b'{"question": "a", "answer": NaN}\n', "field 'answer' is nan, no finite number"),
    bad_line({"question": "a \ud800", "answer": "1"}, "field 'question' holds '\\ud800', which is half of a character"),
    bad_line({"answer": "1"}, "no field 'prompt' or another usual name of it; the row has 'answer'"),
    Mistake(
        name="a.jsonl",
        content=lines({"q": "a", "a": "1", "id": 3}),
        says=":1: no field 'prompt' or another usual name of it; the row has 'a', 'id', 'q'",
        mend="say which columns of the file hold problem and answer: --task.columns.prompt COLUMN --task.columns.answe",
    ),
    Mistake(
        name="a.csv",
        content=b"question,reply\na,1\n",
        says=":2: no field 'answer' or another usual name of it; the row has 'question', 'reply'",
        mend="say which columns of the file hold problem and answer: --task.columns.answer reply; the first line of a",
    ),
    Mistake(
        name="a.jsonl",
        content=FIRST,
        says=":1: no field 'queston'; the row has 'answer', 'question'",
        mend="say which columns of the file hold problem and answer: --task.columns.prompt question",
        options={"columns": {"prompt": "queston"}},
    ),
    Mistake(
        name="a.jsonl",
        content=lines({"question": "a", "answer": "one"}),
        says=":1: the answer holds no number: 'one'; it should end like `#### 42`",
        mend=FIX,
        options={"answer_format": "gsm8k"},
    ),
    Mistake(
        name="a.parquet",
        content=parquet(question=["a", "b"], answer=["1", None]),
        says=", row 2: field 'answer' must be text or a number, is null",
        mend=FIX,
    ),
    Mistake(
        name="a.parquet",
        content=parquet(question=[b"\xff"], answer=["1"]),
        says=", row 1: field 'question' must be",
        mend=FIX,
    ),
    # chats
    bad_line({"prompt": [], "answer": "2"}, "field 'prompt': the chat asks nothing"),
    bad_line({"prompt": [SYSTEM], "answer": "2"}, "field 'prompt': the chat asks nothing: it has no turn of a user"),
    bad_line({"messages": [ASSISTANT]}, "field 'messages': the chat asks nothing: it has no turn of a user"),
    bad_line(
        {"prompt": [USER, ASSISTANT], "answer": "2"}, "field 'prompt': the chat ends with a turn of the assistant"
    ),
    bad_line({"messages": [USER]}, "no field 'answer' or another usual name of it; the row has 'messages'"),
    bad_line(
        {"messages": [USER | {"role": "usr"}, ASSISTANT]}, "field 'messages': turn 1 has the role 'usr'; did you mea"
    ),
    bad_line(
        {"messages": [USER | {"role": "Q"}, ASSISTANT]}, "field 'messages': turn 1 has the role 'Q'; known are 'sy"
    ),
    bad_line({"messages": [{"content": "x"}, ASSISTANT]}, "field 'messages': turn 1 has no role; it has 'content'"),
    bad_line({"messages": [USER | {"content": ""}, ASSISTANT]}, "field 'messages': turn 1, of the user, has no text"),
    bad_line({"messages": ["x"], "answer": "2"}, "field 'messages': turn 1 must be an object, is \"x\""),
    Mistake(
        name="a.csv",
        content=f'question,answer\n"{[USER]}",2\n'.encode(),
        says=":2: field 'question' holds a chat as text, which would be a prompt as it stands; save the rows as JSON",
        mend=FIX,
    ),
    bad_line({"messages": json.dumps([USER, ASSISTANT])}, "field 'messages' holds a chat as text"),
    # demonstrations
    bad_example("sft", {"messages": [USER]}, "the chat has no turn of the assistant to learn from"),
    bad_example("sft", {"messages": []}, "field 'messages': the chat has no turn"),
    bad_example("sft", {"messages": "hi"}, "field 'messages' must be a list of turns, is a str"),
    bad_example("sft", {"messages": json.dumps([USER, ASSISTANT])}, "field 'messages' holds a chat as text"),
    bad_example(
        "sft", {"messages": [USER, {"role": "assistant"}]}, "field 'messages': turn 2, of the assistant, has no"
    ),
    bad_example(
        "sft", {"prompt": [ASSISTANT, USER], "completion": [USER]}, "the chat has no turn of the assistant to l"
    ),
    bad_example(
        "sft", {"prompt": [USER, ASSISTANT], "completion": "2"}, "field 'prompt' ends with a turn of the assista"
    ),
    bad_example("sft", {"prompt": "a"}, "field 'prompt' has no completion beside it; the row has 'prompt'", COLUMNS),
    bad_example("sft", {"prompt": "a", "completion": " "}, "field 'completion' is empty"),
    bad_example(
        "sft", {"title": "a", "id": 1}, "neither a chat (messages), nor a prompt with a completion, nor", COLUMNS
    ),
    bad_example("sft", {"prompt": "a"}, "no field 'b'; the row has 'prompt'", COLUMNS, **{"columns.completion": "b"}),
    # preferences
    bad_example("dpo", {"prompt": "a", "chosen": "b"}, "no field 'rejected' or another usual name of it", PAIR_COLUMNS),
    bad_example(
        "dpo", {"chosen": "a b", "rejected": "a c"}, "no prompt, and 'chosen' and 'rejected' are not both chats"
    ),
    bad_example(
        "dpo", {"chosen": [ASSISTANT], "rejected": [OTHER]}, "the two chats have no common beginning, so there"
    ),
    bad_example("dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are equal"),
    bad_example(
        "dpo", {"prompt": "a", "chosen": ASSISTANT, "rejected": "b"}, "field 'chosen' must be text or a number"
    ),
    bad_example(
        "dpo",
        {"prompt": [USER], "chosen": [ASSISTANT, USER, OTHER], "rejected": [OTHER]},
        "an answer must be one turn of the assistant behind the common prompt, is assistant, user, assistant",
    ),
    bad_example(
        "dpo", {"prompt": [USER], "chosen": [USER], "rejected": [OTHER]}, "an answer must be one turn of the ass"
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_answered_with_file_row_and_mend(tmp_path: Path, mistake: Mistake):
    if mistake.content is not None:
        write(tmp_path / mistake.name, mistake.content)
    with pytest.raises(UserError) as caught:
        load(tmp_path, mistake.name, mistake.job, mistake.options)
    assert str(caught.value).startswith(f"{tmp_path / (mistake.at or mistake.name)}{mistake.says}")
    assert caught.value.hint is not None and caught.value.hint.startswith(mistake.mend)
    assert len(str(caught.value).splitlines()) < SCREEN_LINES

"""Rows beyond those that memory holds: the same rows, in the same order, from a file."""

import os
import random
from pathlib import Path

import pytest
import torch

from rlinf.tasks import spooled
from rlinf.tasks.base import TaskProblem, digest_of
from rlinf.tasks.spooled import SpooledRows


@pytest.mark.parametrize("most_in_memory", [0, 6, 7, 1000])
def test_a_file_holds_what_a_list_would(most_in_memory: int):
    items = [{"text": f"row {index}" * index, "ids": torch.arange(index)} for index in range(7)]
    rows = SpooledRows(items[:3], most_in_memory=most_in_memory)
    rows.extend(items[3:])
    assert len(rows) == 7
    for mine, item in zip(rows, items, strict=True):
        assert mine["text"] == item["text"] and torch.equal(mine["ids"], item["ids"])
    places = [5, 0, 5, 3]
    assert [row["text"] for row in rows.subset(places)] == [items[place]["text"] for place in places]
    assert [row["text"] for row in rows[1:6][::2][-2:]] == [item["text"] for item in items[1:6][::2][-2:]]
    assert rows[-1]["text"] == items[-1]["text"]
    for index in (7, -8):
        with pytest.raises(IndexError):
            rows[index]
    assert not rows[7:]


def test_a_task_from_a_file_is_that_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Order, splits, duplicates and fingerprints; the rows repeat, so that some are dropped."""
    from rlinf.config.load import load_config
    from rlinf.config.overrides import parse_overrides
    from rlinf.tasks.files import FileProblems

    numbers = [random.Random(index).randrange(30) for index in range(60)]
    lines = "".join(f'{{"question": "{n} + 1 =", "answer": "#### {n + 1}"}}\n' for n in numbers)
    (tmp_path / "train.jsonl").write_text(lines)
    (tmp_path / "test.jsonl").write_text('{"question": "7 + 7 =", "answer": "#### 14"}\n')
    flags = [f"--task.train_files=[{tmp_path}/train.jsonl]", f"--task.eval_files=[{tmp_path}/test.jsonl]"]
    config = load_config("gsm8k-grpo", parse_overrides(["--model.path=m", "--task.drop_duplicates=true", *flags]))

    def described() -> tuple[list[TaskProblem], dict[str, str], list[str]]:
        problems = FileProblems(config.task, seed=3)  # type: ignore[reportAttributeAccessIssue]
        return [problems.train_problem(index) for index in range(50)], problems.fingerprints(), problems.notes

    in_memory = described()
    monkeypatch.setattr(spooled, "MOST_IN_MEMORY", 5)
    assert described() == in_memory
    assert "occur again" in in_memory[2][0]


def test_rows_in_a_file_leave_memory():
    """50 MB of rows, of which the process keeps a tenth at most."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    rows = SpooledRows((random.Random(index).randbytes(10_000) for index in range(5_000)), most_in_memory=0)
    assert resident() - before < 5_000_000
    assert rows[4_999] == random.Random(4_999).randbytes(10_000)
    assert digest_of([]) == digest_of(SpooledRows())

"""The table that a run ends with."""

from __future__ import annotations

from rlinf.jobs.base import Score
from rlinf.loop.recorder import final_table

SUCCESS = Score(name="success_at_end", text="success at the end")


def test_tasks_stand_below_with_both_scores() -> None:
    tasks = {"open_the_drawer": (0.25, 0.5), "turn_on_the_stove": (0.0, 1.0)}
    lines = final_table([(SUCCESS, 0.125, 0.75)], None, {"env": 3.0}, 12.0, tasks).splitlines()
    assert [line.split() for line in lines[-2:]] == [
        ["open_the_drawer", "25.0%", "50.0%"],
        ["turn_on_the_stove", "0.0%", "100.0%"],
    ]
    assert len({len(line) for line in lines[-2:]}) == 1


def test_one_task_has_no_table_of_tasks() -> None:
    assert "by task" not in final_table([(SUCCESS, 0.125, 0.75)], None, {"env": 3.0}, 12.0)

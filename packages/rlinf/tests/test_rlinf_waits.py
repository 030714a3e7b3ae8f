"""Who waited for whom, read from the trace of runs whose times are known."""

import json
from pathlib import Path

import pytest

from rlinf.cli.main import main
from rlinf.report import write_report
from rlinf.report.page import render
from rlinf.report.records import read_run
from rlinf.report.timeline import draw_timeline, last_steps
from rlinf.report.waits import Waits, read_waits
from rlinf.run_folder import RunFolder, TraceEvent

EPOCH_S = 1_000_000.0
WORKERS = {"rollout": "cpu:0", "actor": "cpu:1"}


def make_run(
    path: Path,
    rows: list[tuple[str, int, float, float]],
    *,
    max_staleness: int,
    devices: tuple[int, int] = (0, 1),
    ranks: int = 1,
) -> Path:
    """A run with these computations: (group, step, start, end). A step lasts from the end of the one before."""
    folder = RunFolder(path, config_yaml="name: waits\n", command=["rlinf", "train"], keep_checkpoints=1)
    assert folder._trace is not None
    folder._trace._origin_ns = round(EPOCH_S * 1e9)
    stages = [
        {"name": "rollout", "worker": "rollout", "reads": ["prompts"], "writes": ["samples"]},
        {"name": "actor", "worker": "actor", "trains": True, "reads": ["samples"], "writes": []},
    ]
    edges = [{"source": "actor", "target": "rollout"}]
    folder.write("flow.json", json.dumps({"stages": stages, "weight_edges": edges, "max_staleness": max_staleness}))
    placed = [
        {"stage": name, "devices": [device], "num_ranks": ranks, "granularity": 0, "offload": False, "turn": device}
        for name, device in zip(("rollout", "actor"), devices, strict=True)
    ]
    folder.write("plan.json", json.dumps({"mode": "disaggregated", "stages": placed}))
    for group, step, start_s, end_s in rows:
        for rank in range(ranks):
            folder.trace(
                [
                    TraceEvent(
                        name=group,
                        category="stage",
                        lane=f"device {WORKERS[group]}",
                        start_ns=round((EPOCH_S + start_s) * 1e9),
                        duration_ns=round((end_s - start_s) * 1e9),
                        args={"worker": f"{group}/{rank}", "num_items": 1, "step": step, "phase": "train"},
                    )
                ]
            )
    ends = {step: max(end_s for _, other, _, end_s in rows if other == step) for _, step, _, _ in rows}
    before_s = min(start_s for _, _, start_s, _ in rows)
    for step in sorted(ends):
        folder.metrics(step, {"time/step_s": ends[step] - before_s}, time_s=ends[step])
        before_s = ends[step]
    folder.result({"num_steps": len(ends)})
    return path


def pipelined(generate_s: float, train_s: float, max_staleness: int, num_steps: int = 8, pause_at: int = -1):
    """The schedule of overlapping steps, by its definition; before step `pause_at` an evaluation takes 5 s."""
    rows, generated, trained = [], [0.0], [0.0]
    for step in range(num_steps):
        ready = trained[step] + 5 if step == pause_at else trained[max(0, step - max_staleness)]
        start_s = max(generated[-1], ready)
        generated.append(start_s + generate_s)
        rows.append(("rollout", step, start_s, generated[-1]))
        start_s = max(generated[-1], trained[-1])
        trained.append(start_s + train_s)
        rows.append(("actor", step, start_s, trained[-1]))
    return rows


def waits_of(path: Path, rows: list[tuple[str, int, float, float]], max_staleness: int, **more) -> Waits:
    waits = read_waits(read_run(make_run(path, rows, max_staleness=max_staleness, **more)))
    assert waits is not None
    return waits


def test_a_slow_trainer_lets_generation_wait_for_the_step_that_the_bound_names(tmp_path: Path) -> None:
    waits = waits_of(tmp_path / "run", pipelined(1.0, 3.0, 1), 1)
    assert waits.seconds("rollout", "weights") == pytest.approx(6 * 2.0), "all but the first two of eight steps"
    assert waits.duration_s == pytest.approx(7 * 3.0)
    assert waits.seconds("actor", "samples") == 0
    (wait,) = [wait for wait in waits.waits if wait.step == 6]
    assert wait.text == "rollout of step 7 waits until step 5 has been trained"
    assert wait.duration_s == pytest.approx(2.0)
    assert waits.advice().endswith("give actor a further device (plan.devices).")


def test_slow_generation_lets_the_trainer_wait_for_samples(tmp_path: Path) -> None:
    waits = waits_of(tmp_path / "run", pipelined(4.0, 1.0, 2), 2, ranks=2)
    assert waits.share("actor", "samples") == pytest.approx(0.75, abs=0.01)
    assert waits.seconds("rollout", "weights") == 0
    text = "actor waits 75% of the time for samples, and rollout 0% for weights: give rollout a further device"
    assert text in waits.advice()


def test_without_overlap_both_sides_wait_and_a_larger_k_is_advised(tmp_path: Path) -> None:
    waits = waits_of(tmp_path / "run", pipelined(2.0, 2.0, 0), 0)
    assert waits.share("actor", "samples") == pytest.approx(0.5, abs=0.01)
    assert waits.share("rollout", "weights") == pytest.approx(0.5, abs=0.01)
    assert waits.advice().endswith("algorithm.max_staleness 1.")


def test_the_steps_ahead_are_those_of_the_plan(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", pipelined(2.0, 2.0, 0), max_staleness=2)
    plan = json.loads((path / "plan.json").read_text())
    (path / "plan.json").write_text(json.dumps(plan | {"prediction": {"max_staleness": 0}}))
    records = read_run(path)
    waits = read_waits(records)
    assert waits is not None and waits.share("rollout", "weights") == pytest.approx(0.5, abs=0.01)
    assert waits.advice().endswith("Mode auto chose 0 as the steps ahead; with mode disaggregated they are 2.")
    assert "Generation runs 0 steps ahead of training, of at most 2." in render(records)


def test_equal_sides_that_overlap_need_no_change(tmp_path: Path) -> None:
    waits = waits_of(tmp_path / "run", pipelined(2.0, 2.0, 1), 1)
    assert {wait.cause for wait in waits.waits} == {"pause"}, "of the last step"
    assert waits.advice().startswith("Nothing to change")


def test_a_pause_is_nobodys_wait(tmp_path: Path) -> None:
    """Generation has ended its last step before the pause 2 s before the trainer has."""
    waits = waits_of(tmp_path / "run", pipelined(2.0, 2.0, 1, pause_at=4), 1)
    assert waits.seconds("rollout", "pause", 4) == pytest.approx(7.0)
    assert waits.seconds("actor", "pause", 4) == pytest.approx(5.0)
    assert waits.seconds("actor", "samples", 4) == pytest.approx(2.0)
    assert waits.seconds("rollout", "weights") == 0
    assert "evaluate and save less often" in waits.advice()


def test_devices_that_are_shared_have_no_such_waits(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", pipelined(2.0, 2.0, 0), max_staleness=0, devices=(0, 0))
    assert read_waits(read_run(folder)) is None


def test_a_step_that_was_repeated_counts_once(tmp_path: Path) -> None:
    lost = [("rollout", 3, -9.0, -8.0), ("actor", 3, -8.0, -7.0)]
    rows = pipelined(2.0, 2.0, 1)
    waits = waits_of(tmp_path / "run", [*rows[:8], *rows[8:]], 1)
    with_lost = waits_of(tmp_path / "lost", [*lost, *rows], 1)
    assert [wait.text for wait in with_lost.waits] == [wait.text for wait in waits.waits]


def test_explain_of_an_ended_run_names_the_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", pipelined(1.0, 3.0, 1), max_staleness=1)
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert "waits in steps 2 to 8: rollout waits 57% of the time for weights" in out


def test_steps_under_an_earlier_plan_are_left_out(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", pipelined(2.0, 2.0, 1), max_staleness=1)
    (path / "plan_times.json").write_text(json.dumps({"plans": [{"first_step": 0}, {"first_step": 5}]}))
    waits = read_waits(read_run(path))
    assert waits is not None and waits.steps == range(6, 8)


def test_the_timeline_has_no_white_in_it(tmp_path: Path) -> None:
    """Computing and waiting cover both devices in the whole window."""
    records = read_run(make_run(tmp_path / "run", pipelined(1.0, 3.0, 1), max_staleness=1))
    window, waits = last_steps(records), read_waits(records)
    assert window is not None and waits is not None
    window = window.with_waits(wait.to_span() for wait in waits.waits)
    for device in WORKERS.values():
        spans = [span for span in window.spans if span.lanes == (device,)]
        covered_s = sum(min(span.end_s, window.end_s) - max(span.start_s, window.start_s) for span in spans)
        assert covered_s == pytest.approx(window.duration_s)
    assert "waits for step 6" in draw_timeline(window, {})


def test_the_report_shows_waits_and_tokens_by_age(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", pipelined(1.0, 3.0, 1), max_staleness=1)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        share = 0.25 * (row["step"] == 7)
        row["metrics"] |= {"rollout/staleness_0_fraction": share, "rollout/staleness_1_fraction": 1 - share}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(path).read_text()
    assert "before step n: until step n - 2 has been trained" in page
    assert "sampled by weights that are" in page and "75.0" in page

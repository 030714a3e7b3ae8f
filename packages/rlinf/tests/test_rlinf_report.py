"""The report of runs that finished, failed, or hardly began."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlinf.cli.main import main
from rlinf.errors import UserError
from rlinf.report import write_report
from rlinf.report.axes import number, percent, ticks
from rlinf.report.curves import MAX_POINTS, Curve, Line, draw
from rlinf.report.metric_names import curves
from rlinf.report.records import Series, read_run
from rlinf.report.timeline import busy_shares, draw_timeline, last_steps
from rlinf.run_folder import RunFolder, TraceEvent
from rlinf.run_folder.folder import film_path
from rlinf.run_folder.rows import append_rows

CONFIG = "job: reasoning\nname: sort <grpo>\nmode: hybrid\nseed: 7\nalgorithm: {name: grpo}\nrun: {num_steps: 9}\n"
PLAN = {
    "mode": "hybrid",
    "reason": "because & so",
    "stages": [
        {"stage": "rollout", "devices": [0], "num_ranks": 1, "granularity": 8, "offload": True, "turn": 0},
        {"stage": "actor", "devices": [0, 1], "num_ranks": 2, "granularity": 0, "offload": True, "turn": 1},
    ],
}
FLOW = {
    "stages": [
        {"name": "rollout", "reads": ["prompts"], "writes": ["samples"]},
        {"name": "actor", "reads": ["samples"], "writes": []},
    ],
    "weight_edges": [{"source": "actor", "target": "rollout"}],
}
EPOCH_S = 1_000_000.0
VOID = {"meta", "br", "rect", "line", "circle", "polyline", "polygon"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects what the page says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.says = ""
        self.feed(text)
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] not in ("style", "script"):
            self.says += data + "\n"


def span(name: str, worker: str, start_s: float, duration_s: float, step: int, **kinds: str) -> TraceEvent:
    return TraceEvent(
        name=name,
        category=kinds.get("category", "stage"),
        lane=kinds.get("lane", "device cpu:0"),
        start_ns=round((EPOCH_S + start_s) * 1e9),
        duration_ns=round(duration_s * 1e9),
        args={"worker": worker, "num_items": 2, "step": step},
    )


def make_run(path: Path, num_steps: int = 4) -> RunFolder:
    """Step s takes 10 s from second 100 + 10 s: 6 s of rollout on cpu:0, then 4 s of the actor on both devices.
    Before the first step lie 50 s of evaluation that bear its number."""
    folder = RunFolder(path, config_yaml=CONFIG, command=["rlinf", "train"], keep_checkpoints=1)
    assert folder._trace is not None
    folder._trace._origin_ns = round(EPOCH_S * 1e9)
    folder.write("plan.json", json.dumps(PLAN))
    folder.write("flow.json", json.dumps(FLOW))
    folder.trace([span("rollout", "rollout/0", 50, 49, 0)])
    folder.evaluation(0, {"accuracy": 0.25}, time_s=0)
    for step in range(num_steps):
        start_s = 100 + 10 * step
        folder.trace(
            [
                span("wait for lease", "actor/0", start_s, 6, step, category="lease"),
                span("receive weights", "rollout/0", start_s, 0.5, step, category="sync"),
                span("rollout", "rollout/0", start_s + 1, 5, step),
                span("actor", "actor/0", start_s + 6, 4, step, lane="device cpu:0+cpu:1"),
                span("reward", "reward/0", start_s + 3, 1, step, lane="reward/0"),
            ]
        )
        metrics = {"reward/mean": 0.5, "actor/loss": float("nan"), "actor/odd": 3.0}
        times = {"time/step_s": 10.0, "time/rollout_s": 5.0, "time/actor_s": 8.0, "time/sync_s": 0.5}
        folder.metrics(step, metrics | times, time_s=10.0 * (step + 1))
        folder.samples(step, [{"prompt": f"<u>{step}</u>", "completion": "x\ny", "reward": 1.0}])
    return folder


ODD: tuple[Any, ...] = (None, True, -1, 10**400, 1.5, "<script>x</script>", [], ["<script>"], {}, {"<script>": 1})


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:20])
def test_no_record_breaks_the_report_or_gets_into_it_unescaped(tmp_path: Path, odd: Any) -> None:
    folder = make_run(tmp_path / "run")
    folder.evaluation(4, {"accuracy": 0.84}, time_s=40)
    folder.close()
    path = folder.path
    token = {"before": odd, "worst_token": odd, "after": odd, "rollout_logprob": odd, "actor_logprob": odd}
    rows = {
        "samples.jsonl": [token | {"step": 1}, token | {"step": odd}, {"step": odd, "<script>": odd}, {"prompt": odd}],
        "metrics.jsonl": [{"step": odd, "metrics": {"a": 1}}, {"step": 9, "time_s": odd, "metrics": {"<script>": odd}}],
        "evaluations.jsonl": [{"step": 9, "metrics": {"accuracy": odd}}, {"step": odd, "metrics": odd}],
        "trace.json": [{"ph": "X", "ts": odd, "dur": odd, "args": odd}, {"ph": "M", "name": "process_name"}],
    }
    for name, more in rows.items():
        with (path / name).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in more))
    (path / "videos").mkdir()
    for name in ("step-x.mp4", "step-<script>.mp4", f"step-{10**30}.mp4", "step-4.mp4"):
        (path / "videos" / name).write_bytes(b"film")
    text = write_report(path).read_text()
    assert "accuracy on held-out problems" in text and "What ran" in text
    assert text.count("<script>") == 1, "the page's own"
    inside = {"plans": odd, "stages": odd, "sessions": odd, "score": odd, "name": odd, "notes": odd, "packages": odd}
    for content in (inside, odd):
        for name in ("manifest.json", "plan.json", "plan_times.json", "flow.json", "result.json", "config.yaml"):
            (path / name).write_text(json.dumps(content))
        assert write_report(path).read_text().count("<script>") == 1


def test_a_log_probability_beyond_floats_does_not_hide_the_worst_tokens(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.close()
    token = {"step": 1, "before": "a", "worst_token": "token 17", "after": "b", "actor_logprob": -0.5}
    append_rows(folder.path / "samples.jsonl", [token | {"rollout_logprob": value} for value in (10**400, -1.0)])
    assert write_report(folder.path).read_text().count("token 17") == 2


def test_the_report_of_a_finished_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.note("no GPU: CPU slots <2>")
    folder.evaluation(4, {"accuracy": 0.84, "accuracy/aime24": 0.1, "accuracy_error/aime24": 0.05}, time_s=40)
    folder.result({"score": "accuracy", "before": 0.25, "after": 0.84, "training_s": 41.0, "stage_seconds": {}})
    path = write_report(folder.path)
    assert path == folder.path / "report.html"
    text = path.read_text()
    says = Page(text).says
    for expected in (
        "sort <grpo>",
        "finished",
        "no GPU: CPU slots <2>",
        "Because & so.",
        "<u>3</u>",
        "Timeline of steps 2 to 4",
        "rlinf train",
        "receive weights",
        "actor/odd",
        "Accuracy on aime24",
    ):
        assert expected in says
    assert re.search(r"25\.0.% →\s+84\.0.%", says)
    assert re.search(r"4\s+of 9", says)
    assert not re.search(r"<link|<img|src=|@import|url\(|fetch\(", text)  # loads nothing
    assert "<u>3</u>" not in text


def test_predicted_times_stand_beside_measured_ones(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert "Predicted and measured" not in Page(write_report(folder.path).read_text()).says
    probing = {
        "mode": "collocated",
        "first_step": 0,
        "num_steps": 3,
        "step": {"predicted_s": None, "measured_s": 9.0},
        "stages": {},
    }
    planned = {
        "mode": "hybrid",
        "first_step": 3,
        "num_steps": 1,
        "step": {"predicted_s": 10.5, "measured_s": 10.0},
        "stages": {"rollout": {"predicted_s": 4.5, "measured_s": 5.0}},
    }
    folder.write_plan_times([probing, planned])
    says = Page(write_report(folder.path).read_text()).says
    for expected in ("collocated, steps 1 to 3", "hybrid, steps 4 to 4", "+5.0%", "-10.0%"):
        assert expected in says


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.close("RunFailed: actor/1 was killed")
    says = Page(write_report(folder.path).read_text()).says
    assert "failed" in says
    assert "RunFailed: actor/1 was killed" in says


def test_a_stopped_run_has_not_failed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), make_run(tmp_path / "run") as folder:
        raise KeyboardInterrupt
    says = Page(write_report(folder.path).read_text()).says
    assert "stopped; --resume goes on with it" in says
    assert "failed" not in says


def test_both_kinds_of_success_and_the_best_checkpoint_are_shown(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", config_yaml=CONFIG, command=[], keep_checkpoints=1)
    for step, at_end, once in ((0, 0.0, 0.125), (1, 0.34, 0.97)):
        folder.evaluation(step, {"success_once": once, "success_at_end": at_end}, time_s=1.0)
    best = {"checkpoint": "step-000050", "score": 0.7}
    folder.result({"score": "success_at_end", "before": 0.0, "after": 0.34, "best": best})
    folder.close()
    says = Page(write_report(folder.path).read_text()).says
    texts = [percent(0.34), percent(0.97), "best checkpoint, step-000050", percent(0.7)]
    places = [says.find(text) for text in texts]
    assert -1 not in places and places == sorted(places)


def test_success_by_task_is_a_table_and_the_first_and_last_films_are_in_the_page(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", config_yaml=CONFIG, command=[], keep_checkpoints=1)
    (folder.path / "videos").mkdir()
    for step in range(0, 24, 2):
        by_task = {"success_at_end/push": step / 32, "success_at_end/open": 0.5}
        folder.evaluation(step, {"success_at_end": 0.25, **by_task}, time_s=1.0)
        film_path(folder.path, step).write_bytes(f"film {step}".encode())
    film_path(folder.path, 24).write_bytes(b"of an evaluation that a resumed run will do again")
    text = write_report(folder.path).read_text()
    says = Page(text).says
    assert says.index("\nopen\n") < says.index("\npush\n") < says.index("\nall\n")
    assert says.count("\nstep ") == 10 and "step 0\n" in says and "step 22\n" in says
    assert percent(22 / 32) in says and "Success at end on push" not in says
    films = re.findall(r'<video[^>]*src="data:video/mp4;base64,([^"]*)"', text)
    assert [base64.b64decode(film) for film in films] == [b"film 22", b"film 0"]
    assert "10 more are in videos/" in says


def test_a_run_that_is_still_going(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=1)
    assert "running, or stopped before its end" in Page(write_report(folder.path).read_text()).says


@pytest.mark.parametrize("present", ["manifest.json", "config.yaml", "metrics.jsonl"])
def test_missing_files_and_empty_runs(tmp_path: Path, present: str) -> None:
    folder = RunFolder(tmp_path / "run", config_yaml=CONFIG, command=[], keep_checkpoints=1)
    for path in folder.path.iterdir():
        if path.name != present:
            path.unlink()
    (folder.path / present).touch()
    says = Page(write_report(folder.path).read_text()).says
    assert "No step was finished." in says
    assert "The trace holds no whole step." in says


def test_torn_files(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for name in ("plan.json", "flow.json", "metrics.jsonl", "trace.json", "samples.jsonl", "config.yaml"):
        path = folder.path / name
        path.write_bytes(path.read_bytes()[:-9])
    says = Page(write_report(folder.path).read_text()).says
    assert "Timeline of steps 1 to 3" in says  # the fourth step's row is the torn one


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run's folder"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="no run folder"):
        write_report(tmp_path / "none")


def test_the_command_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    assert main(["report", str(folder.path), "--output", str(tmp_path / "pages" / "a.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'pages' / 'a.html'}\n"
    Page((tmp_path / "pages" / "a.html").read_text())


# -- timeline ----------------------------------------------------------------------------------------------------------


def test_the_window_holds_the_last_whole_steps(tmp_path: Path) -> None:
    window = last_steps(read_run(make_run(tmp_path / "run", num_steps=6).path))
    assert window is not None
    assert [step for step, _, _ in window.steps] == [3, 4, 5]
    assert window.start_s == pytest.approx(130)
    assert window.end_s == pytest.approx(160)
    assert len(window.spans) == 15


def test_an_evaluation_that_bears_the_step_s_number_is_outside(tmp_path: Path) -> None:
    window = last_steps(read_run(make_run(tmp_path / "run", num_steps=1).path))
    assert window is not None
    assert window.steps == ((0, pytest.approx(100), pytest.approx(110)),)
    assert len(window.spans) == 5


def test_the_spans_of_a_step_that_a_resumed_run_repeated_are_outside(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=2)
    for step in (1, 2):  # lost: their rows were dropped, their spans are still in the trace
        folder.trace([span("rollout", "rollout/0", 40 + 10 * step, 9, step)])
    window = last_steps(read_run(folder.path))
    assert window is not None
    assert [step for step, _, _ in window.steps] == [0, 1]
    assert len(window.spans) == 10


def test_steps_with_something_between_them_are_not_drawn_as_one_stretch(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=2)
    folder.trace([span("actor", "actor/0", 900, 10, 3)])
    folder.metrics(3, {"time/step_s": 10.0}, time_s=0)
    window = last_steps(read_run(folder.path))
    assert window is not None
    assert [step for step, _, _ in window.steps] == [3]


def test_a_step_that_ends_within_the_next_one_is_not_drawn_with_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=2)
    folder.trace([span("actor", "actor/0", 112, 6, 0)])  # step 1 begins at 110
    window = last_steps(read_run(folder.path))
    assert window is not None
    assert [step for step, _, _ in window.steps] == [1]


def test_what_later_steps_compute_meanwhile_is_drawn(tmp_path: Path) -> None:
    """Generation of each step while the step before trains."""
    folder = make_run(tmp_path / "run", num_steps=1)
    for step in range(1, 5):
        folder.trace([span("rollout", "rollout/0", 100 + 10 * step, 9, step)])
        folder.trace([span("actor", "actor/0", 110 + 10 * step, 9, step)])
        folder.metrics(step, {"time/step_s": 10.0}, time_s=0)
    window = last_steps(read_run(folder.path))
    assert window is not None
    assert [step for step, _, _ in window.steps] == [2, 3, 4]
    assert [(one.name, one.step) for one in sorted(window.spans, key=lambda one: (one.start_s, one.name))] == [
        ("actor", 2), ("rollout", 3), ("actor", 3), ("rollout", 4), ("actor", 4)
    ]  # fmt: skip


def test_busy_shares_count_overlapping_spans_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=1)
    folder.trace([span("rollout", "rollout/1", 102, 3, 0)])  # inside the other rollout's
    window = last_steps(read_run(folder.path))
    assert window is not None
    assert busy_shares(window) == {"cpu:0": pytest.approx(0.9), "cpu:1": pytest.approx(0.4)}


def test_workers_that_compute_at_once_get_a_row_each(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=1)
    window = last_steps(read_run(folder.path))
    assert window is not None
    assert draw_timeline(window, {}).count('class="lane"') == 3  # cpu:0, cpu:1, reward/0
    folder.trace([span("reference", "reference/0", 102, 3, 0)])
    window = last_steps(read_run(folder.path))
    assert window is not None
    drawn = draw_timeline(window, {"rollout": "teal"})
    assert re.findall(r'class="lane"[^>]*>([^<]*)<', drawn) == [
        "cpu:0  rollout/0",
        "cpu:0  reference/0",
        "cpu:0  actor/0",
        "cpu:1",
        "reward/0",
    ]
    assert drawn.count('fill="teal"') == 1


# -- curves and axes ---------------------------------------------------------------------------------------------------


def test_the_metrics_of_a_further_policy_are_drawn_beside_the_first_ones(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=1)
    folder.metrics(1, {"actor/grad_norm": 1.0, "policy/second/actor/grad_norm": 2.0}, time_s=20.0)
    folder.close()
    panels, rest = curves(read_run(folder.path))
    (norms,) = (curve for curve in panels if curve.title == "Gradient norm before clipping")
    assert [(line.label, line.series.values) for line in norms.lines] == [("norm", (1.0,)), ("norm, second", (2.0,))]
    assert not any("grad_norm" in curve.title for curve in rest)


def test_a_long_series_is_drawn_as_means_with_a_band() -> None:
    values = tuple(float(step % 2) for step in range(1000))
    curve = Curve(
        title="t", lines=(Line(label="l", series=Series(steps=tuple(range(1000)), values=values), color="c"),)
    )
    drawn = draw(curve)
    match = re.search(r'<polyline[^>]*points="([^"]*)"', drawn)
    assert match is not None
    points = match[1].split()
    assert len(points) <= MAX_POINTS
    assert "<polygon" in drawn
    assert "<polygon" not in draw(
        Curve(title="t", lines=(Line(label="l", series=Series(steps=(0, 1), values=(1.0, 2.0)), color="c"),))
    )


@pytest.mark.parametrize("values", [(), (3.0,), (0.0, 0.0), (-1e-9, 1e9), (1e-300, 2e-300)])
def test_any_series_can_be_drawn(values: tuple[float, ...]) -> None:
    series = Series(steps=tuple(range(len(values))), values=values)
    drawn = draw(Curve(title="t", lines=(Line(label="l", series=series, color="c"),)))
    assert bool(drawn) == bool(values)
    Page(drawn)
    assert "nan" not in drawn


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.0, 1.0) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-0.013, 0.0171, max_ticks=3) == [-0.01, 0, 0.01]
    assert ticks(0, 3, max_ticks=6, whole=True) == [0, 1, 2, 3]
    assert ticks(0, 1, max_ticks=6, whole=True) == [0, 1]
    assert ticks(1e-9, 1.4e-9) == [1e-9, 1.1e-9, 1.2e-9, 1.3e-9, 1.4e-9]
    assert ticks(5.0, 5.0) == [5.0]


def test_numbers_for_people() -> None:
    assert [number(v) for v in (0, 50, 0.01234, 12.34, 1234.5, 1.2e-7, -0.5)] == [
        "0",
        "50",
        "0.0123",
        "12.3",
        "1,234",
        "1.2e−7",  # noqa: RUF001
        "−0.5",  # noqa: RUF001
    ]
    assert percent(0.8421) == "84.2\u00a0%"


def test_the_verdict_and_the_worst_tokens_are_shown_and_are_no_samples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    verdict = {"step": 0, "agrees": False, "summary": "engine and trainer do NOT agree", "suspects": ["version: <old>"]}
    folder.agreement(verdict)
    worst = {"worst_token": "<7>", "before": "12=", "after": "8", "prompt_index": 3, "position": 3}
    folder.samples(1, [{**worst, "actor_logprob": -0.5, "rollout_logprob": -2.75}])
    folder.samples(2, [{**worst, "worst_token": "nan", "actor_logprob": math.nan, "rollout_logprob": -1.0}])
    text = write_report(folder.path).read_text()
    assert json.loads((folder.path / "manifest.json").read_text())["sessions"][-1]["agreement"] == verdict
    page = Page(text)
    assert "Step 1: engine and trainer do NOT agree." in page.says
    assert "version: <old>" in page.says
    assert "<mark>&lt;7&gt;</mark>" in text
    assert "2.25" in page.says and "inf" in page.says
    assert text.count("12=<mark>") == 2, "they are not among the samples"


@pytest.mark.parametrize(
    ("num_steps", "steps"),
    [(1, [0]), (8, list(range(8))), (9, [0, 2, 4, 6, 8]), (50, [0, 8, 16, 24, 32, 40, 48, 49])],
)
def test_of_a_long_run_the_samples_of_some_steps_are_held_in_memory(
    tmp_path: Path, num_steps: int, steps: list
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("name: x\n")
    rows = [{"step": step, "prompt": f"p{step}", "completion": i} for step in range(num_steps) for i in range(2)]
    append_rows(path / "samples.jsonl", [*rows, {"step": 7, "worst_token": "x"}])
    samples = read_run(path).samples
    assert [row["step"] for row in samples] == [7, *(step for step in steps for _ in range(2))]
    page = write_report(path).read_text()
    assert page.index(f"Step {num_steps}<") <= page.index("Step 1<"), "the newest first, then the first"
    assert [int(step) - 1 for step in re.findall(r"<summary>Step (\d+)<", page)] == steps[1:-1]


def test_an_episode_shows_who_wrote_each_token(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=1)
    segments = [
        {"author": "policy", "text": "<call>", "num_tokens": 3, "version": 4},
        {"author": "tool", "text": "{42}", "num_tokens": 1},
    ]
    other = [{"author": "policy", "text": "other", "num_tokens": 2, "version": 5}]
    row = {"prompt_index": 0, "sample": 0, "prompt": "p", "completion": "42", "cause": "turns", "detail": "5 of 5"}
    folder.samples(0, [row | {"segments": json.dumps(segments), "branches": json.dumps([other])}])
    folder.close()
    page = write_report(folder.path).read_text()
    assert '<span class="by policy" title="policy, version 4, 3 tokens">&lt;call&gt;</span>' in page
    assert '<span class="by tool" title="tool, 1 token">{42}</span>' in page
    assert '<p class="sub">Another branch</p><span class="by policy" title="policy, version 5, 2 tokens">other' in page
    assert "ended by turns: 5 of 5" in page
    assert "tokens: policy 5 (versions 4 to 5), tool 1<" in page


def test_conversations_of_agents_stand_in_their_order(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=1)
    one, two = (
        json.dumps([{"author": "policy", "agent": name, "text": f"{name} says", "num_tokens": 2, "version": 4}])
        for name in ("hinter", "guesser")
    )
    row = {"prompt_index": 0, "sample": 0, "prompt": "p", "completion": "42", "segments": two, "branches": f"[{one}]"}
    folder.samples(0, [row])
    folder.close()
    page = write_report(folder.path).read_text()
    places = [
        page.index(text)
        for text in ("Conversation of hinter", "hinter says", "Conversation of guesser", "guesser says")
    ]
    assert places == sorted(places)


def test_samples_are_whole_groups_below_their_prompt(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=2)
    group = [
        {
            "prompt_index": 0,
            "sample": i,
            "prompt": "What is 6 times 7?",
            "completion": f"It is {answer}<br>",
            "reference_answer": "42",
            "reward": float(answer == "42"),
            "answer": answer,
            "outcome": "right" if answer == "42" else "wrong",
            "truncated": answer == "7",
            "segments": "3 of version 0, 2 of version 1" if answer == "7" else "",
        }
        for i, answer in enumerate(["42", "41", "42", "7"])
    ]
    folder.samples(1, [*group, {"worst_token": "x", "prompt_index": 0}])
    folder.samples(1, [{"prompt_index": i, "prompt": f"prompt {i}", "completion": ""} for i in range(1, 9)])
    folder.close()
    text = write_report(folder.path).read_text()
    says = Page(text).says
    assert says.count("What is 6 times 7?") == 1, "once, not beside each completion"
    for expected in (
        "4 completions, mean reward 0.5, 50.0 % right, reference answer 42",
        "It is 41<br>",
        "answer 41",
        "cut at the token limit",
        "tokens: 3 of version 0, 2 of version 1",
    ):
        assert expected in re.sub(r"\s", " ", says), expected
    assert says.count("answer 42") == 3, "the reference and two completions"
    assert "prompt 2" in says and "prompt 3" not in says, "four groups of a step"


def test_an_episode_of_several_agents_shows_who_spoke_and_what_each_got(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=1)
    segments = [{"author": "policy", "agent": "judge", "text": "no", "num_tokens": 2, "version": 4}]
    other = [{"author": "policy", "agent": "solver", "text": "6", "num_tokens": 1, "version": 4}]
    row = {"prompt_index": 0, "sample": 0, "prompt": "p", "completion": "no", "reward": 0.25}
    row |= {"agent_rewards": json.dumps({"solver": -0.5, "judge": 1.0}), "segments": json.dumps(segments)}
    folder.samples(0, [row | {"branches": json.dumps([other])}])
    folder.close()
    page = write_report(folder.path).read_text()
    assert "solver \N{MINUS SIGN}0.5" in page and "judge 1" in page
    assert 'title="judge, version 4, 2 tokens">no</span>' in page
    assert '<p class="sub">Conversation of solver</p>' in page

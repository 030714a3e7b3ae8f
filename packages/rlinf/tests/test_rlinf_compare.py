"""`rlinf compare`: scores, differences and intervals of finished and running runs, as text, page and picture."""

import json
from pathlib import Path

import pytest

from rlinf.cli.main import main

PNG = b"\x89PNG\r\n"


def make_run(path: Path, seed: int, learning_rate: float, scores: list[float], *, is_finished: bool = True) -> Path:
    """A run that evaluates after each step."""
    path.mkdir()
    (path / "config.yaml").write_text(f"name: sort\nseed: {seed}\nactor: {{learning_rate: {learning_rate}}}\n")
    rows = [{"step": step, "time_s": 2.0 * step, "metrics": {"accuracy": score}} for step, score in enumerate(scores)]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{**row, "metrics": {"reward/mean": row["metrics"]["accuracy"]}} for row in rows[:-1]]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if is_finished:
        (path / "result.json").write_text(json.dumps({"score": "accuracy", "training_s": 9.0}))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    folders = [
        make_run(tmp_path / "first", 0, 0.1, [0.25, 0.5, 0.7]),
        make_run(tmp_path / "second", 1, 0.1, [0.25, 0.5, 0.8]),
        make_run(tmp_path / "faster", 0, 0.2, [0.25, 0.9], is_finished=False),
    ]
    return [str(folder) for folder in folders]


def test_it_shows_scores_differences_and_the_interval_over_seeds(runs: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["compare", *runs]) == 0
    lines = {line.split()[0]: " ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line}
    assert lines["first"].startswith("first accuracy 25.0 % 70.0 % - 2 9 s")
    assert lines["faster"].startswith("faster accuracy 25.0 % 90.0 % - 1, not finished")
    # Student's t with one degree of freedom: 12.706 * sqrt(0.005 / 2)
    assert lines["accuracy"] == "accuracy of 2 seeds (0, 1): 75.0 % ± 63.5 % (95 % interval)"
    assert lines["seed"] == "seed 0 1 0" and lines["actor.learning_rate"] == "actor.learning_rate 0.1 0.1 0.2"


def test_curves_become_a_page_or_a_picture(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page, picture = tmp_path / "new" / "runs.html", tmp_path / "runs.png"
    assert main(["compare", *runs, "--output", str(page)]) == 0
    assert page.read_text().count('<figure class="curve"') >= 2
    assert main(["compare", *runs, "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(PNG)
    assert capsys.readouterr().out.endswith(f"curves: {picture}\n")
    assert main(["compare", *runs, "--output", "runs.pdf"]) == 2
    assert "has to end in .html (a page) or .png (a picture)" in capsys.readouterr().err

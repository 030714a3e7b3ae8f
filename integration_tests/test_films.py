"""Films of a run's evaluations: they change no number, and a browser shows them in the report."""

import json
from pathlib import Path

import pytest

from browser import look
from command_line import rows, train
from rlinf.cli.main import main
from trained_policy import SPOTS

pytest.importorskip("imageio_ffmpeg")


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["{name: cnn, options: {hidden_size: 16}}", "{hidden_sizes: [8]}"], ids=["seen", "drawn"]
)
def test_films_change_no_number_and_are_in_the_report(policy, tmp_path):
    recipe = tmp_path / "spots.yaml"
    recipe.write_text(SPOTS.replace("{name: cnn, options: {hidden_size: 16}}", policy))
    films = {num: train(recipe, tmp_path / f"run{num}", {"env.num_eval_videos": num}) for num in (0, 3)}
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows(films[0], name) == rows(films[3], name)
    assert not (films[0] / "videos").exists()
    assert sorted(path.name for path in (films[3] / "videos").iterdir()) == [f"step-00000{i}.mp4" for i in range(3)]
    assert "<video" not in (films[0] / "report.html").read_text()
    seen = look(films[3] / "report.html", tmp_path)
    size = (3 * (160 + 12) + 4, 160 + 30 + 12 + 4)
    assert [(film["width"], film["height"], film["error"]) for film in seen["films"]] == [(*size, None)] * 2
    assert not seen["wide"] and seen["errors"] == []
    manifest = json.loads((films[3] / "manifest.json").read_text())
    assert not any("num_eval_videos" in note for note in manifest["notes"])


STATE_ALONE = ["--policy.name", "actor_critic", "--env.id", "BLIND", "--env.options", "{}"]


@pytest.mark.parametrize(
    ("num", "more", "expected"),
    [
        ("5", [], "--env.num_eval_videos=5 is more than env.num_eval_episodes=4; film at most 4"),
        (
            "2",
            STATE_ALONE,
            "env.num_eval_videos: the policy sees no picture, and env.id='BLIND' cannot draw: ",
        ),
    ],
)
def test_films_that_cannot_be_made_are_refused_before_anything_starts(num, more, expected, tmp_path, capsys):
    recipe = tmp_path / "spots.yaml"
    recipe.write_text(SPOTS)
    blind = "integration_tests.extensions.blind:Blind"
    line = ["train", str(recipe), "--output", str(tmp_path / "run"), "--env.num_eval_videos", num, *more]
    assert main([part.replace("BLIND", blind) for part in line]) == 2
    assert capsys.readouterr().err.startswith(f"error: {expected.replace('BLIND', blind)}")
    assert not Path(tmp_path / "run").exists()

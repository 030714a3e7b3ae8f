"""`rlinf play`: a policy acts in processes of its own, and what it did is written down, filmed and drawn."""

import json
from functools import partial
from pathlib import Path

import pytest

from browser import look
from command_line import refusal, rows, train
from rlinf.cli.main import main
from trained_policy import SPOTS, make_run

pytest.importorskip("imageio_ffmpeg")
ONE_DEVICE = ("--cluster.num_devices", "1")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "spots")


@pytest.fixture(scope="module")
def played(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("played") / "out"
    assert main(["play", str(run), "--episodes", "3", "--seed", "7", "--output", str(out), *ONE_DEVICE]) == 0
    return out


@pytest.fixture
def refused(tmp_path, capsys):
    return partial(refusal, "play", out=tmp_path / "out", capsys=capsys)


def test_every_episode_is_told_as_it_was(played):
    episodes = [json.loads(line) for line in (played / "episodes.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in episodes] == [7, 8, 9]
    for row in episodes:
        assert row["length"] == len(row["actions"]) == len(row["rewards"]) == 6
        assert row["return"] == pytest.approx(sum(row["rewards"]))
        assert all(-1 <= number <= 1 for action in row["actions"] for number in action)
    result = json.loads((played / "result.json").read_text())
    assert result["num_episodes"] == 3
    assert result["return"] == pytest.approx(sum(row["return"] for row in episodes) / 3)
    assert json.loads((played / "manifest.json").read_text())["job"] == "play"
    assert {path.name for path in played.iterdir()} >= {"episodes.mp4", "play.html", "logs", "config.yaml"}


def test_a_loaded_policy_acts_as_the_played_one(run, played):
    import numpy as np
    from integration_tests.extensions.spots import Spots

    import rlinf

    policy = rlinf.load_policy(run)
    (name,) = policy.reads
    env = Spots(size=40)
    for line in (played / "episodes.jsonl").read_text().splitlines():
        row = json.loads(line)
        observation, _ = env.reset(seed=row["seed"])
        for action in row["actions"]:
            actions = policy.act({name: np.stack([observation["above"]] * 2)})
            assert actions.shape == (2, policy.chunk_size, *policy.actions.shape)
            assert actions[0, 0] == pytest.approx(action, abs=1e-6)
            observation, *_ = env.step(np.array(action, dtype=np.float32))
    with pytest.raises(rlinf.UserError, match=f"the observations lack '{name}'"):
        policy.act({})
    with pytest.raises(rlinf.UserError, match=r"has the shape \[1, 3, 3\], and the policy reads \[n, 40, 40, 3\]"):
        policy.act(np.zeros((1, 3, 3), np.uint8))
    with pytest.raises(rlinf.UserError, match="has the dtype float32, and the policy reads uint8"):
        policy.act(np.zeros((1, 40, 40, 3), np.float32))


def test_a_browser_shows_the_film_and_the_drawings(played, tmp_path):
    seen = look(played / "play.html", tmp_path)
    (film,) = seen["films"]
    assert film["error"] is None and (film["width"], film["height"]) == (3 * (160 + 12) + 4, 160 + 30 + 12 + 4)
    assert film["seconds"] == pytest.approx((7 + 20) / 20, abs=0.06)
    assert len(seen["drawn"]) == 6 and min(seen["drawn"]) > 50
    assert not seen["wide"] and seen["errors"] == []


def test_mistakes_are_told_before_anything_is_written(run, refused, tmp_path):
    language = tmp_path / "language"
    (language / "checkpoints" / "step-000001").mkdir(parents=True)
    (language / "config.yaml").write_text("job: reasoning\n")
    assert refused(str(tmp_path / "absent")).startswith(f"{tmp_path / 'absent'} does not exist")
    assert refused(str(language)).startswith(f"{language} is a run of job=reasoning")
    assert "rlinf eval NAME=FILE --model" in refused(str(language))
    assert refused(str(run), "--checkpoint", "step-000009").startswith("--checkpoint step-000009: ")
    text = refused(str(run), "--env.kind", "gymnasium", "--env.id", "CartPole-v1")
    assert text.startswith("policy.name='cnn' cannot act in env.id='CartPole-v1': it reads pictures")
    assert refused(str(run), "--algorithm.gamma", "0.9").startswith("--algorithm is not a key")
    assert refused(str(run), "--seed", "4294967295").startswith("--seed 4294967295: 8 seeds from there on are not")
    assert refused(str(run), "--episodes", "0") == "--episodes 0: play at least 1\n"
    (language / "checkpoints" / "step-000001").rmdir()
    assert refused(str(language)).startswith(f"{language}: the run has no checkpoint yet")


def test_a_damaged_checkpoint_is_not_played(tmp_path, refused):
    damaged = make_run(tmp_path / "damaged")
    file = damaged / "checkpoints" / "step-000003" / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert "step-000003 is damaged: model/model.safetensors: is not what was written" in refused(str(damaged))


def test_a_missing_extra_is_told_before_anything_starts(run, refused, monkeypatch):
    import rlinf_envs.recording.video

    def missing() -> None:
        raise rlinf_envs.recording.video.EnvError("videos need imageio; pip install 'rlinf-envs[video]'")

    monkeypatch.setattr("rlinf.jobs.films.require_video", missing)
    text = refused(str(run))
    assert text == "videos need imageio; pip install 'rlinf[video]'\nhint: --no-video plays without a film\n"


def test_a_folder_with_something_in_it_stays_as_it_is(run, played, capsys):
    before = sorted(played.iterdir())
    assert main(["play", str(run), "--output", str(played)]) == 2
    err = capsys.readouterr().err
    assert "exists and is not empty\nhint: choose another folder with --output" in err
    assert sorted(played.iterdir()) == before


@pytest.mark.slow
def test_weights_that_do_not_fit_name_what_does_not(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["play", str(run), "--env.options.size", "48", "--output", str(out), *ONE_DEVICE]) == 2
    err = capsys.readouterr().err
    assert "does not fit env.id='integration_tests.extensions.spots:Spots'" in err and "of another shape" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_environment_that_cannot_draw_is_told_without_a_film(tmp_path, capsys):
    recipe = SPOTS.replace("{name: cnn, options: {hidden_size: 16}}", "{hidden_sizes: [8]}")
    run = make_run(
        tmp_path / "run", recipe, "--env.id", "integration_tests.extensions.blind:Blind", "--env.options", "{}"
    )
    out = tmp_path / "out"
    assert main(["play", str(run), "--episodes", "2", "--output", str(out), *ONE_DEVICE]) == 0
    assert "note: there is no film: the policy sees no picture, and" in capsys.readouterr().out
    assert not (out / "episodes.mp4").exists()
    assert (
        "cannot draw" in (out / "play.html").read_text() and len((out / "episodes.jsonl").read_text().split("\n")) == 3
    )


@pytest.mark.slow
def test_a_play_has_the_numbers_of_the_runs_own_evaluation(tmp_path):
    recipe = tmp_path / "spots.yaml"
    recipe.write_text(SPOTS)
    run = train(recipe, tmp_path / "run", {"cluster.num_devices": 1})
    out = tmp_path / "out"
    assert main(["play", str(run), "--episodes", "4", "--output", str(out)]) == 0
    scores = json.loads((out / "result.json").read_text())
    evaluated = rows(run, "evaluations.jsonl")[-1]
    names = ("return", "success_at_end", "success_once", "episode_length")
    assert {name: scores[name] for name in names} == {name: evaluated[name] for name in names}

"""`rlinf eval --compare`: two policies on the same starts, their difference, and how they were evaluated."""

import json
from functools import partial
from pathlib import Path

import pytest

from browser import look
from command_line import refusal
from rlinf.cli.main import main
from trained_policy import make_run

ONE_DEVICE = ("--cluster.num_devices", "1")
FEW = ("--compare.num_episodes", "10", "--compare.first_seed", "40")
CHAOS = """
extends: pushcube-ppo
name: chaos
policy: {hidden_sizes: [64, 64]}
algorithm: {num_minibatches: 1, num_epochs: 1}
env:
  kind: import
  id: integration_tests.extensions.chaos:Chaos
  options: {growth: 3.98}
  num_envs: 4
  num_groups: 2
  num_steps: 60
  max_episode_steps: 60
  num_eval_episodes: 4
run: {num_steps: 2, evaluate_every: 1, stop_at_score: null}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """Two policies with other first weights."""
    folder = tmp_path_factory.mktemp("runs")
    return tuple(make_run(folder / f"chaos-{seed}", CHAOS, "--seed", str(seed)) for seed in (1, 2))


def compare(runs, out: Path, *options: str) -> dict:
    line = ["eval", "--compare", *map(str, runs), *FEW, *ONE_DEVICE, "--output", str(out), *options]
    assert main(line) == 0
    return json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def compared(runs, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "out"
    compare(runs, out)
    return out


def episodes(folder: Path) -> dict[str, list[dict]]:
    rows = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    return {side: [row for row in rows if row["policy"] == side] for side in ("a", "b")}


@pytest.mark.slow
def test_both_policies_have_the_same_starts_and_every_flip_is_listed(compared):
    rows, result = episodes(compared), json.loads((compared / "result.json").read_text())
    assert [row["seed"] for row in rows["a"]] == [row["seed"] for row in rows["b"]] == list(range(40, 50))
    pairs = [(a["success_at_end"], b["success_at_end"]) for a, b in zip(rows["a"], rows["b"], strict=True)]
    flipped = [seed for seed, (a, b) in zip(range(40, 50), pairs, strict=True) if a != b]
    assert flipped and [start["seed"] for start in result["flipped"]] == flipped
    assert result["outcomes"]["only_a"] == sum(a and not b for a, b in pairs)
    assert result["difference"] == pytest.approx(sum(b - a for a, b in pairs) / 10)
    low, high = result["difference_interval_95"]
    assert low < result["difference"] < high
    protocol = result["protocol"]
    assert (protocol["first_seed"], protocol["num_episodes"], protocol["max_episode_steps"]) == (40, 10, 60)
    assert protocol["simulator"]["option.growth"] == "3.98" and len(protocol["simulator"]["digest.code"]) == 64


def test_a_browser_shows_each_flipped_start_as_two_films_side_by_side(compared, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    seen = look(compared / "compare.html", tmp_path)
    (film,) = seen["films"]
    result = json.loads((compared / "result.json").read_text())
    assert film["error"] is None and not seen["wide"] and seen["errors"] == []
    num_rows = len(result["flipped"])
    assert (film["width"], film["height"]) == (2 * (128 + 12) + 4, num_rows * (128 + 30 + 12) + 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        ("--env.num_envs", "1", "--env.num_groups", "1"),
        ("--env.num_envs", "8", "--env.num_groups", "2"),
        ("--env.num_envs", "6", "--env.num_groups", "2", "--env.num_processes", "3"),
    ],
    ids=["one", "eight", "six processes"],
)
def test_any_number_of_simulators_gives_the_same_numbers_to_the_bit(runs, compared, tmp_path, shape):
    again = compare(runs, tmp_path / "out", *shape, "--compare.num_films", "0")
    columns = ("seed", "return_", "length", "success_once", "success_at_end")

    def numbers(folder):
        return {side: [[row[key] for key in columns] for row in rows] for side, rows in episodes(folder).items()}

    assert numbers(tmp_path / "out") == numbers(compared)
    first = json.loads((compared / "result.json").read_text())
    assert again["protocol"]["digest"] == first["protocol"]["digest"] and again["flipped"] == first["flipped"]


@pytest.mark.slow
def test_a_stopped_comparison_goes_on_with_what_is_left(runs, compared, tmp_path, capsys):
    again = tmp_path / "again"
    again.mkdir()
    for name in ("config.yaml", "manifest.json"):
        (again / name).write_text((compared / name).read_text())
    lines = (compared / "episodes.jsonl").read_text().splitlines(keepends=True)
    (again / "episodes.jsonl").write_text("".join(lines[:13]))  # A whole, B torn
    assert main(["eval", "--resume", "--output", str(again)]) == 0
    out = capsys.readouterr().out
    assert "B: " in out and "A: 1" not in out.split("B - A")[0].split("protocol")[0]
    ours, theirs = (json.loads((folder / "result.json").read_text()) for folder in (again, compared))
    assert ours == theirs


@pytest.fixture
def refused(tmp_path, capsys):
    return partial(refusal, "eval", out=tmp_path / "out", capsys=capsys)


def test_other_protocols_are_refused_with_the_keys_that_differ(runs, refused, tmp_path):
    shorter = make_run(tmp_path / "shorter", CHAOS, "--env.max_episode_steps", "6", "--env.num_steps", "6")
    text = refused("--compare", str(runs[0]), str(shorter), *FEW)
    assert text.startswith("A and B were not evaluated alike, so a difference would not be the policies' alone:\n")
    assert "  - max_episode_steps: 60 and 6\n" in text and "--force to compare all the same" in text
    assert refused("--force", "gsm8k", "--model", "m").startswith("--force is for --compare")
    text = refused("--compare", str(runs[0]), str(runs[1]), "--env.options.colour", "red")
    assert "takes no option colour" in text
    assert refused("--compare", str(runs[0]), str(tmp_path / "none")).startswith(f"{tmp_path / 'none'} does not exist")

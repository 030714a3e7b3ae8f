"""`rlinf eval --suite`: variants are played in turn in the same processes, compared with seen, and gone on with."""

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest

from browser import look
from command_line import END_TIMEOUT_S, RLINF, environment, refusal, rows, train
from rlinf.cli.main import main
from trained_policy import SPOTS, make_run

SUITE = Path(__file__).parent / "extensions" / "spots_suite.yaml"
ONE_DEVICE = ("--cluster.num_devices", "1")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "spots")


@pytest.fixture(scope="module")
def evaluation(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("asked") / "out"
    assert main(["eval", "--suite", str(SUITE), str(run), "--output", str(out), *ONE_DEVICE]) == 0
    return out


def episodes(folder: Path) -> dict[str, list[dict]]:
    by_variant: dict[str, list[dict]] = {}
    for line in (folder / "episodes.jsonl").read_text().splitlines():
        row = json.loads(line)
        by_variant.setdefault(row["variant"], []).append(row)
    return by_variant


@pytest.mark.slow
def test_every_variant_has_its_episodes_and_its_score(evaluation):
    variants = episodes(evaluation)
    assert list(variants) == ["seen", "dark", "longer"]
    assert all([row["seed"] for row in variant] == [50000, 50001, 50002, 50003] for variant in variants.values())
    assert {row["length"] for row in variants["longer"]} == {8} and {row["length"] for row in variants["seen"]} == {6}
    assert [row["return_"] for row in variants["dark"]] != [row["return_"] for row in variants["seen"]]
    result = json.loads((evaluation / "result.json").read_text())
    assert set(result["variants"]) == {"seen", "dark", "longer"} and set(result["axes"]) == {"vision", "execution"}
    for name, variant in variants.items():
        share = sum(row["success_at_end"] for row in variant) / 4
        assert result["variants"][name]["success_at_end"] == share
        low, high = result["variants"][name]["interval_95"]
        assert low <= share <= high and (high - low) > 0.4


def test_a_browser_shows_the_table_and_the_film(evaluation, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    seen = look(evaluation / "suite.html", tmp_path)
    assert [film["error"] for film in seen["films"]] == [None] and not seen["wide"] and seen["errors"] == []
    assert seen["films"][0]["width"] == 160 + 12 + 4 and seen["films"][0]["height"] == 3 * (160 + 30 + 12) + 4


@pytest.mark.slow
def test_a_stopped_evaluation_goes_on_with_what_is_left(evaluation, tmp_path, capsys):
    before = episodes(evaluation)
    again = tmp_path / "again"
    again.mkdir()
    for name in ("config.yaml", "manifest.json"):
        (again / name).write_text((evaluation / name).read_text())
    torn = [json.dumps(row) for name in ("seen", "longer") for row in before[name]] + [json.dumps(before["dark"][0])]
    (again / "episodes.jsonl").write_text("\n".join(torn) + "\n")
    assert main(["eval", "--resume", "--output", str(again)]) == 0
    assert "2 variants were played before; 1 are left" in capsys.readouterr().out
    assert episodes(again) == before
    ours, theirs = (json.loads((folder / "result.json").read_text()) for folder in (again, evaluation))
    assert ours == theirs


@pytest.fixture
def refused(tmp_path, capsys):
    return partial(refusal, "eval", out=tmp_path / "out", capsys=capsys)


def test_mistakes_name_the_variant_and_what_is_missing(run, refused, tmp_path):
    def suite(variant: str) -> str:
        file = tmp_path / "suite.yaml"
        file.write_text(
            f"name: own\nvariants:\n  odd: {variant}\n  dim: {{axis: vision, disturb: {{brightness: -0.1}}}}\n"
        )
        return str(file)

    text = refused("--suite", suite("{axis: semantics, disturb: {wordings: ['please {instruction}']}}"), str(run))
    assert text.startswith("suite=own, variant 'odd' changes an instruction, and the policy sees none")
    assert text.endswith("hint: leave it out: --only vision\n")
    text = refused("--suite", suite("{axis: vision, env: {options: {size: 44}}}"), str(run))
    assert text.startswith("suite=own, variant 'odd': env.id='integration_tests.extensions.spots:Spots' shows another ")
    text = refused("--suite", suite("{axis: vision, env: {options: {colour: red}}}"), str(run))
    assert "variant 'odd': env.id=" in text and "takes no option colour" in text
    text = refused("--suite", suite("{axis: sight}"), str(run))
    assert "suite.yaml:3: suite.variants.odd.axis='sight'; allowed: 'vision', 'semantics' or 'execution'" in text
    text = refused("--suite", "metaworld-ood", str(run))
    assert text.startswith("metaworld-ood.yaml:3: suite.env_kind=metaworld, and the policy acts in env.kind=import")
    assert refused("--suite", str(SUITE), str(run), "--only", "sight").startswith("--only: 'sight' is none of vision, ")
    small_pi0 = "{name: pi0, options: {chunk_size: 2, width: 32, num_layers: 1, image_size: 28, max_prompt_tokens: 24}}"
    reader = make_run(tmp_path / "reader", SPOTS.replace("{name: cnn, options: {hidden_size: 16}}", small_pi0))
    text = refused(
        "--suite", suite("{axis: semantics, disturb: {wordings: ['could you {instruction}?']}}"), str(reader)
    )
    assert text.startswith("suite=own, variant 'odd': policy.name='pi0' cannot act in env.id=")
    assert "tokens, and max_prompt_tokens=24; set policy.options.max_prompt_tokens" in text
    assert refused("--suite", str(SUITE)).startswith(f"--suite {SUITE}: give one run's folder")
    blind = make_run(
        tmp_path / "blind",
        SPOTS.replace("{name: cnn, options: {hidden_size: 16}}", "{hidden_sizes: [8]}"),
        *("--env.id", "integration_tests.extensions.blind:Blind", "--env.options", "{}"),
    )
    assert "never says that an episode succeeded" in refused("--suite", str(SUITE), str(blind))


METAWORLD = """
extends: pushcube-ppo
name: reach
policy: {name: cnn, options: {hidden_size: 16}}
algorithm: {num_minibatches: 1, num_epochs: 1}
env:
  kind: metaworld
  id: MT10
  num_envs: 2
  num_groups: 2
  num_steps: 6
  max_episode_steps: 12
  num_eval_episodes: 4
  options: {tasks: [reach-v3, push-v3], cameras: [corner2], image_size: 48}
run: {num_steps: 1, evaluate_every: 1, stop_at_score: null}
"""


@pytest.mark.slow
def test_metaworld_out_of_distribution_has_the_numbers_of_the_run_as_seen(tmp_path):
    pytest.importorskip("metaworld")
    recipe = tmp_path / "reach.yaml"
    recipe.write_text(METAWORLD)
    run = train(recipe, tmp_path / "run", {"cluster.num_devices": 1})
    out = tmp_path / "out"
    line = ["eval", "--suite", "metaworld-ood", str(run), "--only", "vision,execution", "--suite.num_episodes", "4"]
    done = subprocess.run(  # this process may have chosen another way to draw
        [*RLINF, *line, "--output", str(out), *ONE_DEVICE],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=END_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    variants = json.loads((out / "result.json").read_text())["variants"]
    assert len(variants) == 11 and set(variants["seen"]["by_task"]) == {"reach-v3", "push-v3"}
    evaluated = rows(run, "evaluations.jsonl")[-1]
    assert variants["seen"]["return"] == evaluated["return"]
    assert variants["seen"]["success_at_end"] == evaluated["success_at_end"]
    others = {name: variant["return"] for name, variant in variants.items() if name != "seen"}
    assert len(set(others.values())) == 10 and variants["seen"]["return"] not in others.values()

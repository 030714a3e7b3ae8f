"""Suites as data, and what their episodes say."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.config.catalog import read_suite, shipped_suites
from rlinf.config.suites import AXES, SuiteConfig
from rlinf.playing.suite_page import render
from rlinf.playing.suite_run import _variant
from rlinf.playing.suite_scores import COLUMNS, axis_means, rows, score, to_json, wilson
from rlinf_envs import EnvSpec
from rlinf_envs.protocol import EpisodeEnd


@pytest.mark.parametrize("name", shipped_suites())
def test_a_shipped_suite_is_whole(name: str) -> None:
    suite = SuiteConfig.model_validate_json(json.dumps(read_suite(name).values))
    assert suite.name == name and name == f"{suite.env_kind}-ood"
    assert {variant.axis for variant in suite.variants.values()} == set(AXES)
    for variant in suite.variants.values():
        assert variant.about
        assert variant.env != type(variant.env)() or variant.disturb != type(variant.disturb)(), "it changes something"


@pytest.mark.parametrize(("right", "count"), [(0, 10), (5, 10), (10, 10), (44, 50), (1, 1)])
def test_the_interval_is_that_of_the_score_test(right: int, count: int) -> None:
    """Its ends are the shares p at which |right/n - p| is 1.96 deviations of a binomial with that p."""
    low, high = wilson(right, count)
    assert 0 <= low < high <= 1
    for end in (low, high):
        if 1e-9 < end < 1 - 1e-9:
            distance = abs(right / count - end) / math.sqrt(end * (1 - end) / count)
            assert distance == pytest.approx(1.959964, abs=1e-5)


def ends(right: int, count: int, *tasks: str) -> list[EpisodeEnd]:
    return [
        EpisodeEnd(
            env_index=0,
            episode_index=0,
            seed=i,
            return_=1.0 * i,
            length=9,
            success_once=True,
            success_at_end=i < right,
            task=tasks[i % len(tasks)] if tasks else None,
        )
        for i in range(count)
    ]


def test_variants_are_compared_with_seen_and_meant_by_axis() -> None:
    seen = score("seen", "", "as it was", ends(8, 10), None)
    dark = score("dark", "vision", "dark <b>", ends(2, 10, "push", "open"), seen.success_at_end)
    noisy = score("noisy", "vision", "", ends(6, 10), seen.success_at_end)
    far = score("far", "execution", "", ends(9, 10), seen.success_at_end)
    scores = [seen, far, dark, noisy]
    assert (dark.success_at_end, dark.drop, dark.success_once, dark.return_) == (0.2, pytest.approx(0.6), 1.0, 4.5)
    assert dark.by_task == {"open": 0.2, "push": 0.2}
    assert axis_means(scores) == {"vision": pytest.approx(0.4), "execution": 0.9}
    table = rows(scores)
    assert [row[1] for row in table] == ["seen", "dark", "noisy", "mean", "far", "mean"]
    assert table[0][:6] == ("-", "seen", "10", "80.0%", "49.0% to 94.3%", "")
    assert table[3] == ("vision", "mean", "", "40.0%", "", "+40.0%", "", "")
    assert table[4][5] == "-10.0%"
    assert all(len(row) == len(COLUMNS) for row in table)
    found = to_json(scores)
    assert found["variants"]["dark"]["drop"] == pytest.approx(0.6)
    assert found["axes"]["execution"] == {"success_at_end": 0.9, "drop": pytest.approx(-0.1)}
    page = render("suite: run", "10 episodes", scores, None, ["<note>"])
    assert "dark &lt;b&gt;" in page and "&lt;note&gt;" in page and "<video" not in page


@pytest.mark.parametrize("name", ["metaworld-odd", "absent.yaml"])
def test_a_suite_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        Exception, match=r"(did you mean metaworld-ood\?|No such file)[\s\S]*shipped suites: libero-ood"
    ):
        read_suite(name)


def test_what_is_disturbed_alone_is_not_made_again() -> None:
    """Its sentences are others than the run's, where an environment does not know all that it says."""
    suite = SuiteConfig.model_validate_json(json.dumps(read_suite("maniskill-ood").values))
    config: Any = SimpleNamespace(suite=suite, env=SimpleNamespace(eval_seed=50_000))
    made: list[EnvSpec] = []
    spec = EnvSpec(kind="maniskill", id="PickCube-v1", num_envs=2, max_episode_steps=4)
    session: Any = SimpleNamespace(spec=spec, reads=("instruction", "image.base_camera"), check=made.append)
    variants = [_variant(name, variant, config, session) for name, variant in suite.variants.items()]
    assert made == [replace(spec, options={"robot_init_qpos_noise": 0.15})]
    assert sum(variant.spec.disturbance is not None for variant in variants) == len(suite.variants) - 1

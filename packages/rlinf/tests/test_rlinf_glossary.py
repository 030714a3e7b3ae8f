"""The glossary of metrics: every metric that the code records is in it, the page is made from it."""

import re
from pathlib import Path

import pytest

import rlinf_workers
from rlinf.glossary import EVALUATION, TRAINING, find, page
from rlinf_algos.rewards import OUTCOMES

REPOSITORY = Path(__file__).parents[3]
NOT_OF_STEPS = {"sft_warm_up/loss", "check/moved_kl"}
"""Recorded before the first step or by rlinf check, for the terminal."""


def recorded() -> set[str]:
    """Every name that a role records, as it stands in the source; what is filled in is written {}."""
    package = Path(rlinf_workers.__file__).parent
    roles = (package / "roles").rglob("*.py")
    files = [package / "algorithm_parts.py", *roles]
    text = "\n".join(file.read_text() for file in files)
    names = re.findall(r"record(?:_spread)?\(\s*f?\"([^\"]+)\"", text) + re.findall(
        r"\"((?:actor|critic|sft|dpo|reward_model|rewards)/\w+)\"", text
    )
    names = [name.removeprefix("{prefix}") for name in names]  # of a policy
    return {re.sub(r"\{[^}]*\}", "{}", name) for name in names} - NOT_OF_STEPS


def filled(name: str) -> list[str]:
    return [name.replace("{}", part) for part in (OUTCOMES if name == "reward/{}" else ("answer",))]


def test_every_metric_that_a_role_records_is_explained_and_the_other_way_round():
    names = [each for name in recorded() for each in filled(name)]
    assert len(names) > 30, "the search still finds them"
    assert [name for name in names if find(name) is None] == []
    explained = [metric for metric in TRAINING if not metric.name.startswith(("time/", "perf/"))]
    assert [metric.name for metric in explained if not any(metric.covers(name) for name in names)] == []


@pytest.mark.parametrize(
    ("name", "evaluation", "expected"),
    [
        ("time/rollout_s", False, "time/<stage>_s"),
        ("time/step_s", False, "time/step_s"),
        ("reward/part/format", False, "reward/part/<term>"),
        ("accuracy/aime24", True, "accuracy/<set>"),
        ("reward/nonsense", False, None),
        ("reward/aime24", True, "reward/<set>"),
        ("actor/loss", True, None),
        ("policy/guesser/actor/loss", False, "actor/loss"),
    ],
)
def test_families_and_names(name, evaluation, expected):
    metric = find(name, evaluation=evaluation)
    assert (metric and metric.name) == expected


def test_names_are_explained_once_for_each_job():
    for metrics in (TRAINING, EVALUATION):
        names = [
            (metric.name, job)
            for metric in metrics
            for job in ("reasoning", "embodied", "supervised")
            if metric.job in (job, "both")
        ]
        assert len(set(names)) == len(names)


def test_the_page_is_what_the_code_makes():
    written = (REPOSITORY / "docs" / "metrics.md").read_text()
    assert written == page(), "run python -m rlinf.glossary > docs/metrics.md"

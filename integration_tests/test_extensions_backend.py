"""A training backend of one's own, named by its import path in a recipe."""

from pathlib import Path

import pytest

from command_line import SHORT_PUSH, SHORT_SORT, rows, train, weights
from rlinf_workers.testing.backends import check_backend

OWN = {"actor.backend": "integration_tests.extensions.backend:SplitOptimizer", "run.num_steps": 10}
ONE = {"mode": "collocated", "cluster.num_devices": 1}


def test_the_backend_of_the_docs_conforms(tmp_path):
    from integration_tests.extensions.backend import SplitOptimizer

    check_backend(SplitOptimizer, str(tmp_path))


@pytest.mark.parametrize("recipe", ["sort-grpo", pytest.param("pushcube-ppo", marks=pytest.mark.maniskill)])
def test_it_trains_ten_steps_to_the_same_numbers(tmp_path, recipe):
    """Sharing the optimizer's state out changes no number."""
    short = SHORT_SORT if recipe == "sort-grpo" else SHORT_PUSH
    shipped = train(recipe, tmp_path / "shipped", short | ONE | {"run.num_steps": 10})
    own = train(recipe, tmp_path / "own", short | ONE | OWN | {"actor.backend_options": "{backwards: true}"})
    assert len(rows(own)) == 10
    assert rows(own) == rows(shipped)
    expected = weights(shipped)
    assert {name: value for name, value in weights(own).items() if name in expected} == expected


def test_the_docs_show_it_as_it_is():
    root = Path(__file__).parent.parent
    page = (root / "docs/doors/backend.md").read_text()
    assert (root / "integration_tests/extensions/backend.py").read_text() in page

"""A custom training backend, named by its import path in a recipe."""

from pathlib import Path

import pytest

from command_line import SHORT_PUSH, SHORT_SORT, rows, train, weights
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.planning.problems import problem_of_recipe
from rlinf_sched.derive import find_model
from rlinf_workers.testing.backends import check_ranks

OWN = {
    "actor.backend": "integration_tests.extensions.backend:SplitOptimizer",
    "actor.backend_options": "{backwards: true}",
}
ONE = {"mode": "collocated", "cluster.num_devices": 1, "run.num_steps": 10}
REPLICA = ONE | {
    "cluster.num_devices": 2,
    "plan.num_ranks": "{actor: 2}",
}


@pytest.mark.slow
def test_the_backend_of_the_docs_conforms(tmp_path):
    """Two replicas of two ranks."""
    from integration_tests.extensions.backend import SplitOptimizer

    check_ranks(SplitOptimizer, str(tmp_path), num_ranks=4, num_ranks_per_replica=2)


@pytest.fixture(scope="module")
def sorted_by_own(tmp_path_factory):
    return train("sort-grpo", tmp_path_factory.mktemp("own") / "run", SHORT_SORT | REPLICA | OWN)


@pytest.mark.slow
def test_it_trains_ten_steps(sorted_by_own):
    metrics = rows(sorted_by_own)
    assert len(metrics) == 10
    assert any(row["actor/grad_norm"] > 0 for row in metrics)


@pytest.mark.slow
def test_sharing_the_optimizers_state_out_changes_no_number(tmp_path, sorted_by_own):
    check_numbers(sorted_by_own, train("sort-grpo", tmp_path / "run", SHORT_SORT | ONE))


@pytest.mark.slow
@pytest.mark.maniskill
def test_a_policy_trains_with_it_too(tmp_path):
    own = train("pushcube-ppo", tmp_path / "own", SHORT_PUSH | REPLICA | OWN)
    check_numbers(own, train("pushcube-ppo", tmp_path / "shipped", SHORT_PUSH | ONE))


def check_numbers(own, shipped):
    """Equal to the bit, whoever wrote which tensor."""
    assert rows(own) == rows(shipped)
    assert weights(own) == weights(shipped)


def test_its_spec_is_planned_with_and_refuses_by_key():
    """A replica has two devices, each with half of the optimizer's state."""
    data = ["--task.train_files=[a]", "--task.eval_files=[b]"]
    arguments = [*data, "--model.path", "Qwen2.5-1.5B", "--cluster.num_devices", "8", "--mode", "collocated"]
    instances = []
    for name in ("replicated", OWN["actor.backend"]):
        config = load_config("gsm8k-grpo", parse_overrides([*arguments, "--actor.backend", name]))
        *_, one_shard_each = problem_of_recipe(config, gpu="H200").profiles.stages["actor"].instances
        instances.append(one_shard_each)
    shipped, own = instances
    assert (shipped.num_devices, own.num_devices) == (1, 2)
    weights_bytes = 4 * find_model("Qwen2.5-1.5B").num_parameters
    assert shipped.state_bytes - own.state_bytes == weights_bytes, "one of two moments"
    wrong = ["--actor.backend", OWN["actor.backend"], "--actor.backend_options.backwards", "3"]
    with pytest.raises(UserError, match=r"backend_options.backwards=3: expected `bool`, got `int`"):
        load_config("gsm8k-grpo", parse_overrides([*arguments, *wrong]))


def test_the_docs_show_it_as_it_is():
    root = Path(__file__).parent.parent
    page = (root / "docs/plugins/backend.md").read_text()
    assert (root / "integration_tests/extensions/backend.py").read_text() in page

"""Mistakes with `rlinf check` are refused before a process starts."""

import pytest


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("check sft --model.path m --task.train_files t", "in which no engine samples and no policy acts"),
        ("check pushcube-ppo", "demonstrations.source=experts is no source of demonstrations of env.kind=maniskill"),
        ("check reach-pi0-ppo --demonstrations nowhere", "--demonstrations nowhere does not exist"),
        ("check reach-pi0-ppo --demonstrations .", "--demonstrations . is no layout that is known"),
        ("check reach-pi0-ppo --checkpoint best", "reach-pi0-ppo is a recipe"),
        ("check reach-pi0-ppo --demonstrations.num_episodes 3", "demonstrations.num_episodes"),
        ("check sort-grpo --demonstrations experts", "is for robot policies"),
        ("check sort-grpo --demonstrations.source experts", "demonstrations"),
        ("check reach-pi0-ppo", "the policy has random weights, so there is nothing to check"),
        ("check sort-grpo --rollout.enigne sglang", "did you mean"),
        ("check gsm8k-grpo --model.path nowhere", "task.train_files is not set"),
        ("check sort-grpo --output run", "--output"),
    ],
)
def test_mistakes(refused, line, says):
    assert says in refused(*line.split())


def test_the_folder_of_a_published_checkpoint_is_no_run(refused, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    message = refused("check", str(tmp_path))
    assert "is the folder of a published checkpoint, which does not say in which environment it acts" in message
    assert f"libero-oft-grpo --policy.options.folder {tmp_path}" in message


def test_a_folder_that_is_no_run_is_refused(refused, tmp_path):
    (tmp_path / "notes").mkdir()
    assert "is no folder of a run and no checkpoint" in refused("check", str(tmp_path / "notes"))

"""Mistakes with `rlinf check` are refused before a process starts."""

import pytest


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("check pushcube-ppo", "pushcube-ppo is a recipe of job=embodied, whose policy acts and trains in one library"),
        ("check sort-grpo --rollout.enigne sglang", "did you mean"),
        ("check gsm8k-grpo --model.path nowhere", "task.train_files is not set"),
        ("check sort-grpo --output run", "--output"),
    ],
)
def test_mistakes(refused, line, says):
    assert says in refused(*line.split())

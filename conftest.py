"""For every test of the repository: those that are not of a GPU do not see one, on whatever machine they run."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before torch is imported, here and in every process that a test starts. `pytest -m gpu` keeps the GPUs."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

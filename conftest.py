"""For every test of the repository: what none may inherit from the shell and the machine that it happens to run on."""

import os
import signal

import pytest
from hypothesis import settings

# A busy machine makes any example slow.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Before torch is imported, here and for every process that a test starts.

    Tests that are not of a GPU do not see one; `pytest -m gpu` keeps the GPUs. A shell starts what stands before
    `&` with SIGINT ignored, and children inherit that; tests send it, so it does here what it does at a terminal.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

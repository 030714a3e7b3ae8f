"""For every test of the repository: what none may inherit from the shell and the machine that it happens to run on."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

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
    os.environ["HF_HUB_OFFLINE"] = "1"  # a test of names on the Hub starts a process that has another setting
    _choose_drawing()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _choose_drawing() -> None:
    """Before a test imports MuJoCo, which reads the choice only once."""
    with suppress(ImportError):  # engine_tests run without rlinf_envs' simulators
        from rlinf_envs.workarounds.mujoco_drawing import choose_drawing

        choose_drawing()


@contextmanager
def _brief_search() -> Iterator[None]:
    from rlinf_sched.planner import improvement

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_MOST_SEARCHED", "_FEW_WALKED", "_ITEMS_SEARCHED"):
            patch.setattr(improvement, name, getattr(improvement, name) // 10)
        yield


@pytest.fixture(scope="module")
def brief_search() -> Iterator[None]:
    """The planner times a tenth of the plans: for modules that ask for plans, and not for the best ones."""
    with _brief_search():
        yield


@pytest.fixture(params=["brief", pytest.param("whole", marks=pytest.mark.slow)])
def each_search(request: pytest.FixtureRequest) -> Iterator[None]:
    """The planner times a tenth of the plans, and with `--all` also as many as in use: for what holds in both."""
    with _brief_search() if request.param == "brief" else nullcontext():
        yield

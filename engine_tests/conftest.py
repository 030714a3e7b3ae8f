"""Tests that need SGLang itself: `tools/test.sh --engines` makes an environment with it and runs them in there.

`minimum` marks those that .ci/run runs. An engine takes long to start: let many tests share one.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.exit("engine_tests need SGLang; run them with: tools/test.sh --engines [pytest arguments]", returncode=2)


sys.path.append(str(Path(__file__).parent))  # for what tests share, here and in SGLang's processes


@pytest.fixture(scope="session")
def driver() -> str:
    """The interpreter of the checkout's own environment, with another torch stack than this one: what starts runs
    whose rollout is in this environment. This interpreter where there is no other."""
    return os.environ.get("RLINF_TEST_DRIVER", sys.executable)

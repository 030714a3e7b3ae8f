"""Tests that need SGLang or vLLM itself: `tools/test.sh --engines` makes a venv with SGLang and runs those that
need it; `tools/test.sh --engines=vllm` does so with vLLM. Those of OF_BOTH run with the engine of the venv.

`minimum` marks those that .ci/run runs. An engine takes long to start: let many tests share one.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

INSTALLED = {name for name in ("sglang", "vllm") if importlib.util.find_spec(name) is not None}
if not INSTALLED:
    pytest.exit(
        "engine_tests need SGLang or vLLM; run them with: tools/test.sh --engines[=vllm] [arguments]", returncode=2
    )
OF_BOTH = {"test_adapters.py", "test_check.py", "test_evaluation.py", "test_pictures.py", "test_recipes.py"}
of_vllm = {path.name for path in Path(__file__).parent.glob("test_vllm*.py")}
of_sglang = {path.name for path in Path(__file__).parent.glob("test_*.py")} - of_vllm - OF_BOTH
collect_ignore = [*(() if "vllm" in INSTALLED else of_vllm), *(() if "sglang" in INSTALLED else of_sglang)]


sys.path.append(str(Path(__file__).parent))  # for what tests share, here and in the engines' processes


@pytest.fixture(scope="session")
def driver() -> str:
    """The interpreter of the checkout's own environment, with another torch stack than this one: what starts runs
    whose rollout is in this environment. This interpreter where there is no other."""
    return os.environ.get("RLINF_TEST_DRIVER", sys.executable)

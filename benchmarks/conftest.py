"""What the JSON of pytest-benchmark says beside its own: the versions that were compared, and this machine's load."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.harness import installed_versions


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info["load"] = [round(load, 2) for load in os.getloadavg()]
    machine_info["versions"] = installed_versions()

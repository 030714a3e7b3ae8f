"""Makes RayLauncher on the cluster of a test, also in a driver of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlinf_workers.launchers.ray.launcher import RayLauncher

ADDRESS = "RLINF_TEST_RAY_ADDRESS"


def joined(**options) -> RayLauncher:
    """A launcher on the nodes of the cluster that the test has started."""
    from rlinf_workers.launchers.ray.launcher import RayLauncher

    return RayLauncher(address=os.environ[ADDRESS], **options)

"""Predicted and measured memory of every role on its GPUs: memory.json. A resumed run, and one with this run's
profile, plan with it."""

from __future__ import annotations

from rlinf.planning.memory import MemoryPool
from rlinf.run_folder import RunFolder
from rlinf.run_folder.folder import GPU_MEMORY
from rlinf.run_folder.rows import to_json
from rlinf_sched import Plan
from rlinf_workers import Executor


class GpuMemoryHistory:
    """What the ranks on the fullest GPU hold under a plan.

    Args:
        place: the GPU, with the predictions of its ranks; a host is not measured.
    """

    def __init__(self, folder: RunFolder, plan: Plan, place: MemoryPool) -> None:
        self._folder, self._device_bytes = folder, place.has_bytes
        self._predicted = {load.group: load.predicted_gpu_bytes for load in place.loads}
        self._groups = {stage.stage for stage in plan.stages} & self._predicted.keys()
        self._on_gpu = place.held_bytes is not None

    def read(self, executor: Executor) -> None:
        """Asks the workers, and writes the file if the driver tells what their processes hold."""
        if not self._on_gpu:
            return
        ranks = {group: executor.group(group).call("held_gpu_bytes") for group in sorted(self._groups)}
        roles = {
            group: {"predicted_bytes": self._predicted[group], "measured_bytes": max(held)}
            for group, measured in ranks.items()
            if (held := [num_bytes for num_bytes in measured if num_bytes is not None])
        }
        if roles:
            self._folder.write(
                GPU_MEMORY, to_json({"device_bytes": self._device_bytes, "roles": roles}, indent=1) + "\n"
            )

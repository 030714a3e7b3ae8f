"""All that the worker imports from SGLang, in one place; imported after the env vars that SGLang reads are set.

Compare a later version with this list first. The engine's scheduler processes also use `run_scheduler_process`
(child.py).
"""

from sglang.srt.entrypoints.engine import Engine  # pyright: ignore[reportMissingImports]
from sglang.srt.managers.io_struct import (  # pyright: ignore[reportMissingImports]
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.managers.load_snapshot import shm_path_for  # pyright: ignore[reportMissingImports]
from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]
from sglang.srt.utils import MultiprocessingSerializer  # pyright: ignore[reportMissingImports]

__all__ = [
    "BeginWeightUpdateReqInput",
    "ContinueGenerationReqInput",
    "EndWeightUpdateReqInput",
    "Engine",
    "MultiprocessingSerializer",
    "PauseGenerationReqInput",
    "ReleaseMemoryOccupationReqInput",
    "ResumeMemoryOccupationReqInput",
    "ServerArgs",
    "UpdateWeightVersionReqInput",
    "UpdateWeightsFromTensorReqInput",
    "shm_path_for",
]

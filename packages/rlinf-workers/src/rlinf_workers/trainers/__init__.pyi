from .base import (
    BackendSettings as BackendSettings,
    ModelAdapter as ModelAdapter,
    ModelOutputs as ModelOutputs,
    OptimizerSettings as OptimizerSettings,
    TrainingBackend as TrainingBackend,
)
from .checkpoint import host_copy as host_copy, optimizer_tensors as optimizer_tensors
from .replicated.backend import ReplicatedBackend as ReplicatedBackend
from .spec import DTYPE_BYTES as DTYPE_BYTES, TrainerSpec as TrainerSpec

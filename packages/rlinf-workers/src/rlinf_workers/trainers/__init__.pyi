from .base import (
    BackendSettings as BackendSettings,
)
from .base import (
    OptimizerSettings as OptimizerSettings,
)
from .spec import (
    DTYPE_BYTES as DTYPE_BYTES,
)
from .spec import (
    TrainerSpec as TrainerSpec,
)

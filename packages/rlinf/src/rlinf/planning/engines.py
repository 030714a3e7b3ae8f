"""Whether an engine of the rollout can serve a recipe's model, and with what room for keys and values."""

from __future__ import annotations

from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf_sched.derive import JobShape, ModelShape


def check_cut(config: ReasoningConfig, shape: ModelShape) -> None:
    """Whether engines can cut the model over their devices. Raises: UserError."""
    if text := config.rollout.engine_spec.cut_problem(shape, config.rollout.tensor_parallel_size):
        raise UserError(f"rollout.tensor_parallel_size{text}")


def can_be_served(config: ReasoningConfig, shape: ModelShape, num_devices: int) -> bool:
    """Whether engines can cut the model, and so many devices are whole engines."""
    size = config.rollout.tensor_parallel_size
    return not config.rollout.engine_spec.cut_problem(shape, size) and num_devices % size == 0


def pool_shortage(config: ReasoningConfig, shape: ModelShape, job: JobShape) -> str | None:
    """Why an engine's KV pool is too small for the longest sequence; None: it is not, or the engine has no pool."""
    text = config.rollout.engine_spec.shortage(shape, job)
    return text and f"rollout.engine={config.rollout.engine}: {text}"

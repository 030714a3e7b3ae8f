"""Whether an engine of the rollout can serve a recipe's model, and with what room for keys and values."""

from __future__ import annotations

from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf_sched.derive.memory import JobShape
from rlinf_sched.derive.memory.sglang import kv_token_bytes, kv_tokens, longest_tokens, sglang_memory
from rlinf_sched.derive.sglang import check_engine_cut
from rlinf_sched.derive.shapes import ModelShape


def check_cut(config: ReasoningConfig, shape: ModelShape) -> None:
    """Whether engines can cut the model over their devices. Raises: UserError."""
    try:
        check_engine_cut(shape, config.rollout.tensor_parallel_size)
    except ValueError as error:
        raise UserError(str(error)) from error


def can_be_served(config: ReasoningConfig, shape: ModelShape, num_devices: int) -> bool:
    """Whether engines can cut the model, and so many devices are whole engines."""
    try:
        check_cut(config, shape)
    except UserError:
        return False
    return num_devices % config.rollout.tensor_parallel_size == 0


def pool_shortage(shape: ModelShape, job: JobShape) -> str | None:
    """Why an engine's KV pool is too small for the longest sequence; None: it is not, or the engine has no pool."""
    if job.engine != "sglang":
        return None
    has, needed = kv_tokens(shape, job), longest_tokens(job)
    if has >= needed:
        return None
    size, share = job.tensor_parallel, job.engine_options.get("mem_fraction_static")
    weights, pool = sglang_memory(shape, job).weights, needed * kv_token_bytes(shape, job)
    return (
        f"rollout.engine=sglang: the KV cache of an engine on {size} device{'s' if size > 1 else ''} would hold "
        f"{max(0, has):,} tokens, and the longest sequence has {needed:,} ({pool / 2**30:.2f} GiB on each device, "
        f"beside {weights / 2**30:.2f} of weights; a device has {job.device_bytes / 2**30:.1f}"
        + (f", rollout.sglang.mem_fraction_static={share})" if share else ")")
    )

"""The mathematics of reinforcement-learning post-training, as pure functions on tensors.

From the rewards to the number to minimise: `rewards` -> `grpo_advantages` or `gae` -> `token_logprobs` ->
`ppo_clip_loss`, `clipped_value_loss`, `kl_k3` -> `token_mean`. Masked-out elements reach nothing, NaN included; a
non-finite number inside the mask raises `NonFiniteError` with its place. Nothing broadcasts by accident.

The names are those of `_exports`, imported at first use: `rlinf_algos.algorithm` is for programs without torch too.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_algos._exports import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    exports = importlib.import_module("rlinf_algos._exports")
    if name in globals():  # a module that was imported with them
        return globals()[name]
    if not hasattr(exports, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(exports, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})

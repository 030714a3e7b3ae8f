"""The mathematics of reinforcement-learning post-training, as pure functions on tensors.

From the rewards to the loss: `rewards` -> `grpo_advantages` or `gae` -> `token_logprobs` -> `ppo_clip_loss`,
`clipped_value_loss`, `kl_k3` -> `token_mean`. Masked-out elements affect nothing, NaN included; a non-finite number
inside the mask raises `NonFiniteError` with its place. Nothing broadcasts by accident.

A name is imported when it is first used, so `Algorithm` and `preset` also work in programs without torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

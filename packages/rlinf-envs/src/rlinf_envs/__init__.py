"""Batched environments with replayable episodes: one protocol for Gymnasium, ManiSkill3 and custom environments.

Names are imported on first use, so that describing environments (`kind_spec`) needs no torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

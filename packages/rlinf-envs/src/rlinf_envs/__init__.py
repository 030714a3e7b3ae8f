"""Batched environments with replayable episodes: one protocol over Gymnasium, ManiSkill3 and your own.

A name is imported when it is first used, so that what describes environments (`kind_spec`) needs no torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Rewards checked by rule, by tests or by a model: from (completion, reference) to a `RewardResult`, known by name.

A name is imported when it is first used: only `RewardModel` needs torch, and the processes that judge texts do without.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Planning for RL post-training: dependencies (flow graph), devices (cluster), and how the flow runs on them (plan).

Needs neither torch nor Ray nor a GPU: a plan can be made, read and checked on any machine.

Names are imported at first use, so that shapes can be read without numpy.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Planning for RL post-training: what depends on what (flow graph), where it may run (cluster), how it runs (plan).

Needs neither torch nor Ray nor a GPU: a plan can be made, read and checked on any machine.

A name is imported when it is first asked for, so that shapes can be read without numpy.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

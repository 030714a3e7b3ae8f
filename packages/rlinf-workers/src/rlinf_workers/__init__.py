"""Worker processes and the execution of flows: the same program under any plan.

Names are imported at first use, so that what needs no torch (rlinf_workers.explaining) starts without it.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

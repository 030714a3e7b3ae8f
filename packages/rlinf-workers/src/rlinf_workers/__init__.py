"""Worker processes and the execution of flows: the same program under any plan.

Names are imported at first use, so that what needs no torch (rlinf_workers.explaining) starts without it.
"""

import os

import lazy_loader

# Numbers do not depend on a plan if a row of a matrix product does not depend on the other rows (decision 002). Intel's
# library promises that in its strict mode, which it chooses at the first product of a process.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

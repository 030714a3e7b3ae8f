"""First import of the fork server: makes it end with the driver and ignore the terminal's Ctrl-C.

By default, multiprocessing's server outlives a killed driver as long as any worker lives.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1

signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
